"""How long a worker takes to join a running job, from its process's start to its first token on the current version.

    cold   kill -9 ─▶ a new process ─▶ imports ─▶ engine starts ─▶ registered ─▶ version loaded ─▶ first token
                                            └─▶ the newest version is pulled meanwhile
    warm   cut off until its lease is over ─▶ registered ─▶ pulled, loaded ─▶ first token

A warm one has an engine, and fetches what was published while it was away. Each is done several times, in a real run
on real processes; medians are printed. Cold begins when the operating system has made the process, warm when the
scheduler has it again: what the node waits before it starts another, or the worker between two tries, is not in it.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Final

from benchmarks._command import Result, add_job_options, command_line, measured, show
from benchmarks._harm import Harm, HarmedRun
from benchmarks._jobs import BenchmarkFailed, hardware, job_text, prepare_job, use_cores
from benchmarks._processes import ROOT
from configs.loader import load_job
from configs.schema import JobConfig

SHORT: Final = ("--times", "2")
"""For ``bench all``."""
SETTINGS: Final = ("steps=100000", "metrics.tensorboard=false", "limits.restart_max=1000")


class Joining:
    """Has workers of one run join again, and keeps the times."""

    def __init__(self, run: HarmedRun, job: JobConfig) -> None:
        self._run = run
        self._workers = job.rollout.workers
        self._lease_s = job.limits.lease_s
        self.times: dict[str, list[float]] = {}

    def cold(self, worker: str) -> None:
        """A new process, with everything to be done."""
        self._run.wait_serving(self._workers)
        harm = self._run.harm(worker, signal.SIGKILL)
        self._run.after(harm, "worker_down", worker=worker)
        registered = self._run.after(harm, "worker_registered", worker=worker)
        began_s = self._run.began_s(worker)
        engine_s = float(registered["engine_start_s"])
        self._note("cold_start", registered["time_s"] - began_s - engine_s)
        self._note("cold_engine", engine_s)
        self._from_registration("cold", harm, worker, began_s)

    def warm(self, worker: str) -> None:
        """The same process, whose engine is there, after others have gone on without it."""
        self._run.wait_serving(self._workers)
        cut = Harm(worker, time.time())
        self._run.inject("partition", {"link": ["head", worker]}, lasts_s=self._lease_s)
        registered = self._run.after(cut, "worker_registered", worker=worker)
        self._from_registration("warm", cut, worker, registered["time_s"])

    def _from_registration(self, kind: str, harm: Harm, worker: str, began_s: float) -> None:
        version = self._run.after(harm, "worker_version", worker=worker)
        token = self._run.after(harm, "worker_began", worker=worker)
        registered = self._run.after(harm, "worker_registered", worker=worker)
        self._note(f"{kind}_registered_to_version", version["time_s"] - registered["time_s"])
        self._note(f"{kind}_pull", version["pull_s"])
        self._note(f"{kind}_load", version["load_s"])
        self._note(f"{kind}_version_to_token", token["time_s"] - version["time_s"])
        self._note(f"{kind}_total", token["time_s"] - began_s)

    def _note(self, name: str, seconds: float) -> None:
        self.times.setdefault(f"{name}_s", []).append(round(seconds, 4))


def measure(options: argparse.Namespace, directory: Path) -> Result:
    """One run, whose last worker joins again and again."""
    use_cores(options.cores)
    result: Result = {"hardware": hardware()}
    job_file = prepare_job(options.job, options.set or [], directory, options.model)
    job = load_job(job_file, list(SETTINGS))
    run = HarmedRun(directory / "run", job_file, settings=list(SETTINGS))
    try:
        run.wait_for_step(1)
        joining = Joining(run, job)
        victim = f"rollout-{job.rollout.workers - 1}"
        for number in range(options.times):
            joining.cold(victim)
            joining.warm(victim)
            print(f"{number + 1} of {options.times}", file=sys.stderr)
        summary = run.end()
    except AssertionError as error:
        raise BenchmarkFailed(str(error)) from error
    finally:
        run.close()
    result |= {name: round(statistics.median(values), 3) for name, values in joining.times.items()}
    return result | {
        "times": joining.times,
        "job": f"{job_text(job)}; {job.rollout.engine} engine, {job.rollout.workers} workers",
        "prompts_lost": summary["prompts_lost"],
        "samples_trained_twice": summary["samples_trained_twice"],
    }


def main(args: list[str]) -> int:
    """Measure and print."""
    parser = command_line("join", __doc__)
    add_job_options(parser, ROOT / "benchmarks" / "jobs" / "loop.yaml")
    parser.add_argument("--times", type=int, default=5, help="how often a worker joins, cold and warm each")
    options = parser.parse_args(args)
    show(measured(measure, options), options, _print_table)
    return 0


def _print_table(result: Result) -> None:
    print(f"{result['job']}; {result['hardware']['class']}")
    for name in sorted(name for name in result if name.endswith("_s") and name.startswith(("cold", "warm"))):
        print(f"  {name:<32} {result[name]:>8.3f} s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
