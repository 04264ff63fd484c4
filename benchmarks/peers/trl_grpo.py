"""Time to the same reward: Headrace against TRL's GRPOTrainer, from the same checkpoint, on the same cores.

    tasks:  short  configs/quickstart.yaml (spell_backward, at most 12 tokens)
            long   benchmarks/peers/long_tail.yaml (capital letters for small ones, 4 to 61 tokens)

    model, made once ─┬─▶ headrace run, in each mode ─▶ reward and seconds of each step
                      └─▶ trl_worker, in TRL's own environment ─▶ the same

Reached is a reward when the mean of ``WINDOW`` steps in a row is at least it. Counted is the time from the start of
the first step: neither the imports of one nor the processes of the other; ``start_s`` gives those beside it. TRL tries
one and two torch threads, and the faster one counts. See README.md for how its environment is made.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final

from actors.environments.prompts.sources import open_source
from actors.environments.prompts.tokenizer import TextCodec
from benchmarks._command import Result
from benchmarks._jobs import (
    hardware,
    job_text,
    last_line,
    model_of,
    prepare_job,
    run_headrace,
    settings_for,
    stream_index,
    use_cores,
)
from benchmarks._processes import ROOT
from benchmarks.peers.long_tail import write_rows
from configs.loader import load_job
from configs.schema import JobConfig

TASKS: Final = {
    "short": ROOT / "configs" / "quickstart.yaml",
    "long": ROOT / "benchmarks" / "peers" / "long_tail.yaml",
}
MODES: Final = ("sync", "dynamic", "async")
TARGET: Final = 0.9
WINDOW: Final = 5


def time_to_reward(steps: Sequence[Result], target: float, window: int = WINDOW) -> tuple[int, float] | None:
    """(step, seconds) at whose end the mean reward of ``window`` steps reached ``target``; None if it never did.

    ``steps`` have ``seconds`` since the start of the first one, and ``reward_mean``.
    """
    for last in range(window - 1, len(steps)):
        recent = [step["reward_mean"] for step in steps[last - window + 1 : last + 1]]
        if sum(recent) / window >= target:
            return last, float(steps[last]["seconds"])
    return None


def measure_ours(job_file: Path, run_dir: Path, mode: str, steps: int) -> list[Result]:
    """Headrace's steps, with seconds since the first one began."""
    run = run_headrace(job_file, run_dir, [f"steps={steps}", f"sync.mode={mode}", *settings_for(mode)])
    seconds = accumulate(float(row["seconds"]) for row in run.rows)
    return [{"seconds": at, "reward_mean": row["reward_mean"]} for at, row in zip(seconds, run.rows, strict=True)]


def measure_trl(job_file: Path, scratch: Path, steps: int, target: float, python: str, threads: int) -> Result:
    """TRL's steps in its own environment; it stops when the target is reached."""
    job = load_job(job_file)
    order = {
        "job": job.model_dump_json(),
        "model": str(model_of(job_file)),
        "rows": prompt_rows(job, model_of(job_file), steps * job.algorithm.prompts_per_step),
        "steps": steps,
        "target": target,
        "window": WINDOW,
        "threads": threads,
        "scratch": str(scratch),
    }
    scratch.mkdir(parents=True, exist_ok=True)
    file = scratch / "order.json"
    file.write_text(json.dumps(order), encoding="utf-8")
    return json.loads(last_line([python, "-m", "benchmarks.peers.trl_worker", str(file)]))


def prompt_rows(job: JobConfig, model: Path, count: int) -> list[Result]:
    """The first ``count`` prompts in Headrace's order: text, answer and row of the data set."""
    source, codec = open_source(job.data, job.seed), TextCodec(model, job.data)
    rows: list[Result] = []
    for ordinal in range(count):
        index = stream_index(job.data, job.seed, len(source), ordinal)
        if index is None:
            break
        row = source.row(index)
        rows.append({"prompt": codec.encode(row.prompt)[0], "answer": row.answer, "index": row.index})
    return rows


def compare(ours: Sequence[Result], theirs: Sequence[Result], target: float) -> Result:
    """Times to the reward and how many times shorter ours is; None where one never got there."""
    reached, peer = time_to_reward(ours, target), time_to_reward(theirs, target)
    return {
        "ours_seconds": None if reached is None else round(reached[1], 2),
        "ours_steps": None if reached is None else reached[0] + 1,
        "trl_seconds": None if peer is None else round(peer[1], 2),
        "trl_steps": None if peer is None else peer[0] + 1,
        "times_shorter": None if reached is None or peer is None else round(peer[1] / reached[1], 2),
        "seconds_per_step": {"ours": _per_step(ours), "trl": _per_step(theirs)},
        "reward_last": {"ours": _last(ours), "trl": _last(theirs)},
    }


def _per_step(steps: Sequence[Result]) -> float | None:
    return round(steps[-1]["seconds"] / len(steps), 3) if steps else None


def _last(steps: Sequence[Result]) -> float | None:
    recent = [step["reward_mean"] for step in steps[-WINDOW:]]
    return round(sum(recent) / len(recent), 3) if recent else None


def task_data(task: str, directory: Path) -> list[str]:
    """Make the data of ``task`` in ``directory`` if it has some of its own; returns overrides of its job file."""
    if task != "long":
        return []
    directory.mkdir(parents=True, exist_ok=True)
    write_rows(directory / "long_tail.jsonl")
    return [f"data.path={directory / 'long_tail.jsonl'}"]


def measure_task(options: argparse.Namespace, task: str, directory: Path) -> Result:
    """One task, ours first."""
    overrides = [*task_data(task, directory), *(options.set or [])]
    job_file = prepare_job(TASKS[task], overrides, directory, options.model)
    ours: dict[str, list[Result]] = {}
    for mode in MODES if options.mode == "all" else (options.mode,):
        print(f"{task}: headrace, {mode}", file=sys.stderr)
        ours[mode] = measure_ours(job_file, directory / mode, mode, options.steps)
    runs: list[Result] = []
    for threads in (int(part) for part in options.threads.split(",")):
        print(f"{task}: TRL, {threads} threads", file=sys.stderr)
        scratch = directory / f"trl-{threads}"
        runs.append(measure_trl(job_file, scratch, options.steps, options.target, options.trl_python, threads))
    best = min(runs, key=lambda run: run["steps"][-1]["seconds"] / len(run["steps"]))
    found: Result = {mode: compare(steps, best["steps"], options.target) for mode, steps in ours.items()}
    return found | {"trl_start_s": round(best["start_s"], 2), "job": job_text(load_job(job_file))}


def trl_version(python: str) -> str | None:
    """The version of TRL in that environment; None if it cannot be imported."""
    asked = subprocess.run(
        [python, "-c", "import trl; print(trl.__version__)"], capture_output=True, text=True, timeout=300, check=False
    )
    return asked.stdout.strip() if asked.returncode == 0 else None


def main(args: list[str]) -> int:
    """Measure the tasks; with ``--json`` the last line is the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.trl_grpo", description=main.__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--task", choices=(*TASKS, "both"), default="both")
    parser.add_argument("--mode", choices=(*MODES, "all"), default="all")
    parser.add_argument("--steps", type=int, default=80, help="give up after so many")
    parser.add_argument("--target", type=float, default=TARGET)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--threads", default="1,2", help="torch threads that TRL may try")
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter of the environment that has TRL")
    parser.add_argument("--model", type=Path, help="start from this model (one task only)")
    parser.add_argument("--set", action="append", metavar="a.b=c")
    options = parser.parse_args(args)
    version = trl_version(options.trl_python)
    if version is None:
        print("TRL is not installed there; benchmarks/peers/README.md says how", file=sys.stderr)
        return 2
    if options.model is not None and options.task == "both":
        parser.error("--model goes with one --task")
    use_cores(options.cores)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    result: Result = {"hardware": hardware(), "trl": version, "target": options.target}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        for task in TASKS if options.task == "both" else (options.task,):
            result[task] = measure_task(options, task, Path(scratch) / task)
    print(json.dumps(result, indent=None if options.json else 2), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
