"""What the benchmarks need that run whole jobs: the model made once, Headrace as a process of its own. And for all of
them, what the machine is.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks._processes import ROOT
from configs.loader import dump_job, load_job
from configs.run_files import METRICS
from configs.schema import DataConfig, JobConfig

_LOOK_S: Final = 2.0
"""Long enough to see who computes now; the load average also remembers who did a minute ago."""
OFF_POLICY: Final = ("one_step_barrier", "async")
RUN_TIMEOUT_S: Final = 3600.0
"""One measured run: far longer than any that tells something."""


class BenchmarkFailed(Exception):
    """A measured process failed; the message holds its last lines."""


def prepare_job(job_file: Path, overrides: Sequence[str], directory: Path, model: Path | None = None) -> Path:
    """Write a job file whose models exist already, so that no measured run makes them; returns its path.

    Checkpoints are only taken at the end: the loop takes none.
    """
    from supervisors.preparation.model_preparation import prepare_model
    from supervisors.preparation.phase import to_nobody
    from supervisors.preparation.reward_preparation import prepare_rewards

    directory.mkdir(parents=True, exist_ok=True)
    job = load_job(job_file, [*overrides, "checkpoint.every=0"])
    path = model if model is not None else asyncio.run(prepare_model(job, directory))
    rewarded, _ = asyncio.run(prepare_rewards(job, directory, path, _say, to_nobody))
    prepared = rewarded.model_copy(
        update={"model": job.model.model_copy(update={"source": "hf", "path": str(path.resolve()), "revision": None})}
    )
    file = directory / "bench_job.yaml"
    file.write_text(dump_job(prepared), encoding="utf-8")
    return file


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def model_of(job_file: Path) -> Path:
    """The directory of a prepared job's model."""
    return Path(str(load_job(job_file).model.path))


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run of Headrace: its summary, and its rows of metrics.jsonl."""

    summary: dict[str, Any]
    rows: list[dict[str, Any]]


def run_headrace(job_file: Path, run_dir: Path, overrides: Sequence[str]) -> Run:
    """``headrace run … --json`` in a process of its own.

    Raises:
        BenchmarkFailed: it did not finish all of its steps.
    """
    sets = [part for override in overrides for part in ("--set", override)]
    command = [sys.executable, str(ROOT / "main.py"), "run", str(job_file), "--dir", str(run_dir), "--json", *sets]
    summary = json.loads(last_line(command))
    if summary.get("state") != "finished":
        raise BenchmarkFailed(
            f"headrace run ended as {summary.get('state')}: {summary.get('error', 'no reason given')}"
        )
    lines = (run_dir / METRICS).read_text(encoding="utf-8").splitlines()
    return Run(summary=summary, rows=[json.loads(line) for line in lines])


def last_line(command: Sequence[str], *, timeout_s: float = RUN_TIMEOUT_S) -> str:
    """Run ``command`` in the repository's root, in a process group that ends with it; the last line that it printed.

    Raises:
        BenchmarkFailed: it failed, said nothing, or took too long.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise BenchmarkFailed(f"{command[1:3]} took longer than {timeout_s:g} s") from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = out.splitlines()
    if process.returncode != 0 or not lines:
        raise BenchmarkFailed(
            f"{' '.join(command)} ended with {process.returncode}:\n" + "\n".join(err.splitlines()[-20:])
        )
    return lines[-1]


def samples_per_second(steps: Sequence[dict[str, Any]], skip: int) -> float:
    """Samples over seconds of the steps after the first ``skip`` (all of them if there are no more)."""
    steady = steps[skip:] or steps
    return sum(step["samples"] for step in steady) / sum(step["seconds"] for step in steady)


def use_cores(count: int) -> list[int]:
    """Keep this process, and so all that it starts, on ``count`` cores; returns which."""
    chosen = sorted(os.sched_getaffinity(0))[:count]
    os.sched_setaffinity(0, chosen)
    return chosen


def hardware() -> dict[str, Any]:
    """The machine as a class (figures of one class may be compared), and how many cores others kept busy just now."""
    import psutil
    import torch

    vectors = torch.backends.cpu.get_cpu_capability().lower()
    cores = len(os.sched_getaffinity(0))
    return {
        "class": f"{platform.machine()}-{vectors}-{cores}core",
        "cores": cores,
        "vectors": vectors,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_before": round(psutil.cpu_percent(interval=_LOOK_S) / 100.0 * (psutil.cpu_count() or 1), 2),
    }


def settings_for(mode: str) -> tuple[str, ...]:
    """What suits a mode on two cores: off-policy, a worker has one of them and the trainer the other."""
    return ("sync.max_staleness=1", "rollout.workers=1") if mode in OFF_POLICY else ()


def job_text(job: JobConfig) -> str:
    """One line that says which work was measured."""
    algorithm = job.algorithm
    batch = f"{algorithm.prompts_per_step} prompts x {algorithm.group_size}"
    return f"{job.data.task}, {batch}, at most {job.rollout.max_tokens} tokens"


def stream_index(data: DataConfig, seed: int, length: int, ordinal: int) -> int | None:
    """Which row the ``ordinal``-th prompt of the stream is; None after the last epoch."""
    from actors.environments.prompts.sources import epoch_order

    epoch, position = divmod(ordinal, length)
    if data.epochs is not None and epoch >= data.epochs:
        return None
    return int(epoch_order(data, seed, length, epoch)[position]) if data.shuffle else position
