"""Two jobs side by side under one command, on a training service or with a trainer each, and what their records say.

run_pair ─▶ headrace run FIRST SECOND [--services] ─▶ PairRun ─▶ Window in which both are at work, over all repeats

Invariants
- One clock: the time of day of this machine. Events have it, and so has the birth of a process.
- A trainer counts for as long as its process is there, whatever it does.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
import xxhash

from actors.control.errors import ControlError
from actors.ledger.journal import committed_samples
from benchmarks._jobs import BenchmarkFailed
from configs.loader import load_job
from configs.run_files import JOURNAL
from supervisors.testing.run_under_test import HeadraceJobs, RunRecord

_LOOK_S: Final = 1.0
"""Interval of looking which trainers are there: seldom enough to cost the jobs nothing."""
_PATIENCE_S: Final = 3600.0


@dataclass
class Life:
    """Follows one process from its birth to when it was seen last; times of day."""

    began_s: float
    seen_s: float

    def within(self, begin_s: float, end_s: float) -> float:
        """Seconds of it between the two. A life is seen once a look: its end is as old as one look."""
        return max(0.0, min(self.seen_s + _LOOK_S, end_s) - max(self.began_s, begin_s))


@dataclass
class PairRun:
    """Holds a finished run of jobs side by side. ``trainers``: by process id."""

    jobs: dict[str, RunRecord]
    summaries: dict[str, dict[str, Any]]
    trainers: dict[int, Life]
    said: str
    """Text that the command wrote for people."""


@dataclass
class JobWindow:
    """Holds what one job did in a window: ``steps`` whole ones in ``seconds``, with their rows."""

    seconds: float = 0.0
    steps: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    def mean(self, key: str) -> float:
        return sum(float(row[key]) for row in self.rows) / len(self.rows)


@dataclass
class Window:
    """Holds the time for which all jobs were at work, summed over repeated runs."""

    jobs: dict[str, JobWindow] = field(default_factory=dict[str, JobWindow])
    seconds: float = 0.0
    trainers_s: float = 0.0
    """Seconds of all trainers' processes together."""

    def add(self, run: PairRun, skip: int) -> None:
        """Add a run, from when each job has taken ``skip`` steps.

        Raises:
            BenchmarkFailed: no whole step of a job lies in it.
        """
        times = {name: _published(job) for name, job in run.jobs.items()}
        begin_s = max(at_s.get(skip, float("inf")) for at_s in times.values())
        end_s = min(max(at_s.values(), default=0.0) for at_s in times.values())
        for name, at_s in times.items():
            inside = sorted(version for version, when_s in at_s.items() if begin_s <= when_s <= end_s)
            if len(inside) < 2:
                raise BenchmarkFailed(f"job {name}: no whole step while both were at work; give it more --steps")
            job = self.jobs.setdefault(name, JobWindow())
            job.seconds += at_s[inside[-1]] - at_s[inside[0]]
            job.steps += inside[-1] - inside[0]
            job.rows += [row for row in run.jobs[name].rows() if inside[0] <= row["step"] < inside[-1]]
        self.seconds += end_s - begin_s
        self.trainers_s += sum(life.within(begin_s, end_s) for life in run.trainers.values())

    @property
    def trainer_s_a_step(self) -> float:
        """Seconds of trainers' processes for a step of any job."""
        return self.trainers_s / self.seconds / sum(1.0 / job.step_s for job in self.jobs.values())

    @property
    def bubble(self) -> float:
        """Part of the trainers' time for which none of them computed; for jobs that say what they computed."""
        return 1.0 - sum(job.mean("compute_s") / job.step_s for job in self.jobs.values())


def _published(job: RunRecord) -> dict[int, float]:
    """Times at which each version was there for the first time: version n ends step n - 1."""
    times: dict[int, float] = {}
    for event in job.events("version_available"):
        times.setdefault(int(event["version"]), float(event["time_s"]))
    return times


def run_pair(directory: Path, files: Sequence[Path], services: Mapping[str, Any] | None = None) -> PairRun:
    """Run the jobs of ``files`` side by side to their end.

    Raises:
        BenchmarkFailed: a job did not finish, or broke a promise.
    """
    run = HeadraceJobs(directory, files, services=services)
    trainers: dict[int, Life] = {}
    own = [name for name, file in zip(run.jobs, files, strict=True) if load_job(file).trainer.service is None]
    try:
        until_s = time.monotonic() + _PATIENCE_S
        while not run.over and time.monotonic() < until_s:
            with contextlib.suppress(ControlError, OSError):  # the head is not there yet, or has just gone
                _look(run, own, trainers)
            time.sleep(_LOOK_S)
        summaries = run.finish(timeout_s=_LOOK_S)
    except AssertionError as error:
        raise BenchmarkFailed(str(error)) from error
    finally:
        run.close()
    said = directory.with_name(f"{directory.name}.err").read_text("utf-8")
    return PairRun(run.jobs, summaries, trainers, said)


def _look(run: HeadraceJobs, own: Sequence[str], trainers: dict[int, Life]) -> None:
    """Note the trainers that are there: the services, and those of the jobs that have their ``own``."""
    rows = [row for row in run.call("tree") if row["role"] == "train_service"]
    for job in own:
        rows += [row for row in run.call("tree", {"job": job}) if row["role"] == "trainer"]
    for row in rows:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(row["pid"])
            if row["pid"] and process.is_running():
                trainers.setdefault(row["pid"], Life(process.create_time(), 0.0)).seen_s = time.time()


def came_to(job: RunRecord, summary: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a job has come to: its samples, its losses, and a hash of each file of its last checkpoint."""
    samples, checkpoint = committed_samples(job.run_dir / JOURNAL), Path(str(summary["checkpoint"]))
    state = json.loads((checkpoint / "state.json").read_text("utf-8"))
    return (
        [(one.step, one.prompt, one.sibling, one.tokens_hash, one.reward) for one in samples],
        [(row["step"], row["loss"], row["grad_norm"]) for row in job.rows()],
        {name: hash_of_tensors(checkpoint / name) or file["xxh3"] for name, file in state["files"].items()},
    )


def hash_of_tensors(file: Path) -> str:
    """A hash of a safetensors file, whatever the order of its header's keys: torch's shards have it at random.

    Empty: it is no such file.
    """
    if file.suffix != ".safetensors":
        return ""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        digest = xxhash.xxh3_128(json.dumps(header, sort_keys=True).encode())
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
