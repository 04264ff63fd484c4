"""Whether anything grows: a run at full rate for half an hour, harmed now and then, every process of it looked at.

    headrace run ── worker, trainer, rewards, weights        a node over TCP ── worker        a puller elsewhere
         every few seconds: resident memory, descriptors, threads of each; segments in shared memory
         every minute: kill -9 of a worker, now and then of the weight server or of the reward worker

A process that was killed begins anew, so growth is told of lives that lasted for ``--life-s`` after the warm-up; the
first worker is spared, so that one does.
Whatever lies in shared memory when all is over has leaked, and so has what is more than is in use while it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from actors.control.errors import ControlError
from actors.weights.segments import run_id, segment_directory
from benchmarks._command import Result, add_check_option, add_job_options, command_line, measured, show_and_check
from benchmarks._harm import HarmedRun, with_vocabulary
from benchmarks._jobs import BenchmarkFailed, hardware, job_text, prepare_job, use_cores
from benchmarks._processes import ROOT, beside
from benchmarks._samples import Growth, Sampler, growth
from configs.loader import load_job
from supervisors.machine.machine import CLUSTER

DRIFT_GOAL: Final = 0.05
"""Most that resident memory may drift, either way."""
SERVICES: Final = ("weights", "rewards")
"""Killed in turn, each time after ``_WORKERS_BETWEEN`` workers."""
_WORKERS_BETWEEN: Final = 4


class Soak:
    """One run, those beside it, and what was seen of them."""

    def __init__(self, run: HarmedRun, roots: dict[str, int], options: argparse.Namespace) -> None:
        self._run, self._options = run, options
        self._draw = random.Random(f"soak {options.seed}")
        self._began_s = time.monotonic()
        self.sampler = Sampler(roots)
        self.kills: Counter[str] = Counter()
        self.segments: list[int] = []

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began_s

    def go_on(self) -> None:
        """Look and harm until the time is over."""
        next_kill_s = self._options.kill_every_s
        while self.seconds < 60.0 * self._options.minutes:
            began_s = self.seconds
            self._look()
            if self.seconds >= next_kill_s:
                next_kill_s += self._options.kill_every_s
                self._kill()
            if self._run.over:
                raise BenchmarkFailed(f"the run ended by itself\n{self._run.last_words()}")
            time.sleep(max(0.0, self._options.every_s - (self.seconds - began_s)))

    def _look(self) -> None:
        try:
            names = {pid: name for name, pid in self._run.processes().items()}
        except (ControlError, OSError):
            names = {}
        self.sampler.look(self.seconds, names)
        self.segments.append(len(segments(self._run.run_dir)))

    def _kill(self) -> None:
        turn, service = divmod(self.kills.total(), _WORKERS_BETWEEN + 1)
        if service == _WORKERS_BETWEEN:
            victim = SERVICES[turn % len(SERVICES)]
        else:
            workers = sorted(name for name in self._run.processes() if name.startswith("rollout-"))
            victim = self._draw.choice(workers[1:] or workers)
        if self._run.harm_if_there(victim, signal.SIGKILL) is not None:
            self.kills[victim] += 1
            print(f"{self.seconds:.0f} s: killed {victim}", file=sys.stderr)

    def growths(self) -> list[Growth]:
        """The growth of every life that lasted."""
        warm_s, least_s = self._options.warm_s, self._options.life_s
        found = (growth(life, life.samples[0].at_s + warm_s, least_s) for life in self.sampler.lives.values())
        return sorted((each for each in found if each is not None), key=lambda each: (each.name, -each.seconds))


def segments(run_dir: Path) -> list[Path]:
    """What lies in shared memory of the run, elsewhere's puller included."""
    tree = os.walk(segment_directory())  # unlike rglob it does not mind if a neighbour's directory goes meanwhile
    return [
        Path(top, name) for top, _, names in tree for name in names if name.startswith(f"headrace-{run_id(run_dir)}-")
    ]


def free_endpoint() -> str:
    """Where the head can listen; known before it does, as those that join must know it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{taken.getsockname()[1]}"


def told(found: Sequence[Growth]) -> dict[str, Any]:
    """The longest life of each name, and how many others lasted."""
    lives = Counter(each.name for each in found)
    longest = {each.name: each for each in reversed(found)}  # the longest of a name comes first, and so wins
    return {
        name: {
            "seconds": round(each.seconds),
            "resident_mib": each.resident_mib,
            "own_mib": each.own_mib,
            "drift": round(each.drift, 4),
            "fds": each.fds,
            "threads": each.threads,
            "course_mib": each.course_mib,
            "lives": lives[name],
        }
        for name, each in sorted(longest.items())
    }


def missed(result: Result) -> list[str]:
    """Goals that were not met, in sentences."""
    drifts = [
        f"{name}: resident memory {each['drift']:+.1%}, the goal is within {DRIFT_GOAL:.0%}"
        for name, each in result["processes"].items()
        if abs(each["drift"]) > DRIFT_GOAL
    ]
    more = [
        f"{name}: at the end always more {what} than ever at its beginning, {each[what][1]} and {each[what][0]}"
        for name, each in result["processes"].items()
        for what in ("fds", "threads")
        if each[what][1] > each[what][0]
    ]
    left = [f"segments left in shared memory: {result['segments_left']}"] if result["segments_left"] else []
    return drifts + more + left


def measure(options: argparse.Namespace, directory: Path) -> Result:
    """One run, for as long as ``options`` say."""
    use_cores(options.cores)
    machine, endpoint = hardware(), free_endpoint()
    job_file = prepare_job(options.job, options.set or [], directory, options.model)
    job = load_job(job_file)
    settings = [
        f"cluster.listen={endpoint}",
        f"checkpoint.every={job.checkpoint.every or 50}",
        *with_vocabulary(job_file),
    ]
    memory = segment_directory() / f"headrace-{directory.name}"
    memory.mkdir()
    run = HarmedRun(directory / "run", job_file, settings=settings)
    puller = {"name": "puller", "job": job.name, "cluster": CLUSTER, "endpoint": endpoint, "machine": "elsewhere"}
    try:
        second = run.add_node("second", endpoint)
        run.wait_for_step(1)
        with beside("data_plane._weights", "follower", json.dumps(puller | {"memory": str(memory)})) as follower:
            roots = {"machine": run.process.pid, "node": second.pid, "puller": follower.pid}
            soak = Soak(run, roots, options)
            first = run.rows()[-1]
            soak.go_on()
            rows = [row for row in run.rows() if row["step"] > first["step"]]
            took_s = soak.seconds
        summary = run.end()
    except AssertionError as error:
        raise BenchmarkFailed(str(error)) from error
    finally:
        run.close()
        left = segments(directory / "run")
        for path in [*left, *memory.iterdir()]:
            path.unlink(missing_ok=True)
        memory.rmdir()
    result = {
        "hardware": machine,
        "minutes": options.minutes,
        "steps": len(rows),
        "steps_per_second": round(len(rows) / took_s, 2),
        "tokens_per_second": round(sum(row["tokens_generated"] for row in rows) / took_s),
        "kills": dict(soak.kills),
        "processes": told(soak.growths()),
        "segments_max": max(soak.segments),
        "segments_last": soak.segments[-1],
        "segments_left": [path.name for path in left],
        "prompts_lost": summary["prompts_lost"],
        "samples_trained_twice": summary["samples_trained_twice"],
        "job": f"{job_text(job)}; {job.rollout.engine} engine, {job.sync.mode}",
    }
    return result | {"missed": missed(result)}


def main(args: list[str]) -> int:
    """Measure and print; with ``--check`` hold the figures against their goals."""
    parser = command_line("soak", __doc__)
    add_job_options(parser, ROOT / "benchmarks" / "jobs" / "soak.yaml")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every-s", type=float, default=5.0, help="between two looks")
    parser.add_argument("--kill-every-s", type=float, default=60.0, help="between two kills")
    parser.add_argument("--warm-s", type=float, default=240.0, help="of each life, that do not count")
    parser.add_argument("--life-s", type=float, default=300.0, help="that a life must last beyond, to be told of")
    parser.add_argument("--seed", type=int, default=0, help="who is hit")
    add_check_option(parser)
    options = parser.parse_args(args)
    return show_and_check(measured(measure, options), options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
