"""Recovery times on real processes, from the signal to the moment when work goes on.

    kill -9 of a rollout worker, many times ─▶ worker_down (detect_exit_s) ─▶ samples_reassigned (reassign_*_s)
    SIGSTOP of a rollout worker             ─▶ worker_down (detect_hang_s) ─▶ samples_reassigned (hang_reassign_s)
    kill -9 of the trainer                  ─▶ the next step committed for the first time (trainer_to_progress_s)
    kill -9 of the head                     ─▶ the new head is ready ─▶ the next such step (head_to_progress_s)

A time of a worker ends when the last of its samples is with another worker; a kill that found it idle counts for
detection alone. Where one figure stands for several faults it is the longest, but for the percentiles.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks._command import Result, add_check_option, add_job_options, command_line, measured, show_and_check
from benchmarks._harm import Harm, HarmedRun, Row, percentile, with_vocabulary
from benchmarks._jobs import (
    BenchmarkFailed,
    hardware,
    job_text,
    prepare_job,
    use_cores,
)
from benchmarks._processes import ROOT
from configs.loader import load_job
from configs.run_files import CONTROL_ENDPOINT

GOALS: Final = {
    "detect_hang_s": 2.0,
    "reassign_p50_s": 0.3,
    "reassign_p99_s": 1.0,
    "hang_reassign_s": 3.0,
    "head_to_progress_s": 5.0,
}
_WRITTEN_S: Final = 0.2
"""What the head records in one go is in the file by then."""
EXPORTED: Final = ("detect_max_s", "reassign_max_s", "trainer_to_progress_s")
"""Columns of metrics.jsonl, of the head's first life: what the run says of itself."""


class Recovery:
    """Harms one run, and keeps the times."""

    def __init__(self, run: HarmedRun, workers: int, seed: int) -> None:
        self._run = run
        self._workers = workers
        self._draw = random.Random(f"recovery {seed}")
        self.times: dict[str, list[float]] = {}

    def _note(self, name: str, harm: Harm, row: Row) -> None:
        self.times.setdefault(name, []).append(round(row["time_s"] - harm.at_s, 4))

    def lose_worker(self, number: signal.Signals, detect: str, reassign: str) -> bool:
        """Signal a worker that serves; False if it held nothing just then."""
        serve = self._run.wait_serving(self._workers - 1)  # the others have room for what it holds
        time.sleep(self._draw.uniform(0.2, 1.2))  # at any moment of a step
        victim = self._draw.choice(sorted(serve))
        harm = self._run.harm(victim, number)
        self._note(detect, harm, self._run.after(harm, "worker_down", worker=victim))
        time.sleep(_WRITTEN_S)
        if self._run.look_after(harm.at_s, "samples_returned", worker=victim) is None:
            return False
        self._note(reassign, harm, self._run.after(harm, "samples_reassigned", worker=victim))
        return True

    def lose_trainer(self) -> None:
        """To the next step that had not been committed before, and until that step's row is written."""
        self._run.wait_serving(self._workers)
        time.sleep(self._draw.uniform(0.5, 2.0))
        harm = self._run.harm("trainer", signal.SIGKILL)
        self._note("detect_exit_s", harm, self._run.after(harm, "service_down", role="trainer"))
        progress = self._run.after(harm, "progress_resumed", lost="trainer")
        self._note("trainer_to_progress_s", harm, progress)
        self._run.wait_for_step(progress["step"])

    def lose_head(self) -> None:
        """From the moment when the new head can be talked to."""
        self._run.wait_serving(self._workers)
        time.sleep(self._draw.uniform(0.5, 2.0))
        harm = self._run.harm("head", signal.SIGKILL)
        progress = self._run.after(harm, "progress_resumed", lost="head")
        ready = Harm("head", (self._run.run_dir / CONTROL_ENDPOINT).stat().st_mtime)
        self.times.setdefault("head_ready_s", []).append(round(ready.at_s - harm.at_s, 4))
        self._note("head_to_progress_s", ready, progress)

    def repeat(self, what: str, count: int, number: signal.Signals, detect: str, reassign: str) -> None:
        """Until ``count`` workers have been lost that held samples."""
        lost = 0
        for _ in range(3 * count):
            lost += self.lose_worker(number, detect, reassign)
            print(f"{what} {lost} of {count}", file=sys.stderr)
            if lost >= count:
                return
        raise BenchmarkFailed(f"workers are idle too often: {lost} of {3 * count} held samples when hit ({what})")


def figures(times: dict[str, list[float]]) -> dict[str, float]:
    """What is printed of many times: percentiles of the reassignments after a kill, of all else the longest."""
    found = {name: max(values) for name, values in times.items() if name != "reassign_s"}
    if moved := times.get("reassign_s"):
        found["reassign_p50_s"] = percentile(moved, 0.50)
        found["reassign_p99_s"] = percentile(moved, 0.99)
        found["reassign_max_s"] = max(moved)
    return found


def missed(result: dict[str, Any]) -> list[str]:
    """Goals that were not met, in sentences."""
    return [
        f"{name}: {result[name]} s, the goal is {goal} s"
        for name, goal in GOALS.items()
        if name in result and result[name] > goal
    ]


def measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """One run, harmed again and again, each time after it has recovered."""
    use_cores(options.cores)
    result: dict[str, Any] = {"hardware": hardware()}
    job_file = prepare_job(options.job, options.set or [], directory, options.model)
    job = load_job(job_file)
    settings = ["checkpoint.every=5"] + (with_vocabulary(job_file) if job.rollout.engine == "simulated" else [])
    run = HarmedRun(directory / "run", job_file, settings=settings)
    try:
        run.wait_for_step(1)
        recovery = Recovery(run, job.rollout.workers, options.seed)
        recovery.repeat("kill -9", options.kills, signal.SIGKILL, "detect_exit_s", "reassign_s")
        recovery.repeat("SIGSTOP", options.hangs, signal.SIGSTOP, "detect_hang_s", "hang_reassign_s")
        for count in range(options.trainers):
            recovery.lose_trainer()
            print(f"trainer {count + 1} of {options.trainers}", file=sys.stderr)
        exported = {name: run.rows()[-1][name] for name in EXPORTED}
        for count in range(options.heads):
            recovery.lose_head()
            print(f"head {count + 1} of {options.heads}", file=sys.stderr)
        rows = run.rows()
        summary = run.end()
    except AssertionError as error:
        raise BenchmarkFailed(str(error)) from error
    finally:
        run.close()
    result |= figures(recovery.times)
    result |= {
        "step_s": round(percentile([row["seconds"] for row in rows], 0.5), 3),
        "counts": {name: len(values) for name, values in recovery.times.items()},
        "times": recovery.times,
        "exported": exported | {"head_to_progress_s": rows[-1]["head_to_progress_s"]},
        "job": f"{job_text(job)}; {job.rollout.engine} engine, {job.rollout.workers} workers",
        "prompts_lost": summary["prompts_lost"],
        "samples_trained_twice": summary["samples_trained_twice"],
    }
    result["missed"] = missed(result)
    return result


def parse(args: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line("recovery", __doc__)
    add_job_options(parser, ROOT / "benchmarks" / "jobs" / "recovery.yaml")
    parser.add_argument("--kills", type=int, default=24, help="rollout workers that are killed while they hold samples")
    parser.add_argument("--hangs", type=int, default=4, help="rollout workers that are stopped")
    parser.add_argument("--trainers", type=int, default=3, help="deaths of the trainer")
    parser.add_argument("--heads", type=int, default=3, help="deaths of the head")
    parser.add_argument("--seed", type=int, default=0, help="who is hit, and when")
    add_check_option(parser)
    return parser.parse_args(args)


def main(args: list[str]) -> int:
    """Measure and print; with ``--check`` hold the figures against their goals."""
    options = parse(args)
    return show_and_check(measured(measure, options), options, _print_table)


def _print_table(result: Result) -> None:
    print(f"{result['job']}; {result['hardware']['class']}; a step takes {result['step_s']} s")
    for name in sorted(set(result) & {*GOALS, "detect_exit_s", "trainer_to_progress_s", "head_ready_s"}):
        goal = f"goal {GOALS[name]:g}" if name in GOALS else ""
        print(f"  {name:<24} {result[name]:>8.3f} s  {goal}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
