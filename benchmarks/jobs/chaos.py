"""What it costs to lose one of the rollout workers again and again, beyond the capacity that was away with it.

    the job ─┬─ left alone                              ─▶ tokens/s
             └─ kill -9 of a worker, in turn, every 20 s ─▶ tokens/s, and how long each was away

    lost = 1 - tokens/s harmed / tokens/s alone
    away = worker-seconds between a kill and the moment when that worker serves again / all worker-seconds
    beyond = lost - away: tokens of the last engine step, prefills of what moved, work that was badly shared

Both runs do the same work: lengths are a function of seed, prompt and sibling. The first steps do not count.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks._command import Result, add_check_option, add_job_options, command_line, measured, show_and_check
from benchmarks._harm import Harm, HarmedRun, Row, with_vocabulary
from benchmarks._jobs import (
    BenchmarkFailed,
    hardware,
    job_text,
    prepare_job,
    use_cores,
)
from benchmarks._processes import ROOT
from configs.loader import load_job

BEYOND_GOAL: Final = 0.05
_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Window:
    """The measured part of a run, by time of day."""

    began_s: float
    ended_s: float
    tokens: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / (self.ended_s - self.began_s)


def away_s(kills: Sequence[Harm], events: Sequence[Row], window: Window) -> list[float]:
    """For each kill within the window: how long that worker was away, as far as it falls into the window."""
    spans: list[float] = []
    for kill in kills:
        back = (
            row["time_s"]
            for row in events
            if row["event"] == "worker_version" and row["worker"] == kill.name and row["time_s"] > kill.at_s
        )
        spans.append(min(next(back, window.ended_s), window.ended_s) - max(kill.at_s, window.began_s))
    return [round(span, 3) for span in spans if span > 0]


def compare(alone: Window, harmed: Window, away: Sequence[float], workers: int) -> dict[str, float]:
    """Shares of the throughput."""
    lost = 1.0 - harmed.tokens_per_second / alone.tokens_per_second
    share = sum(away) / (workers * (harmed.ended_s - harmed.began_s))
    return {
        "alone_tokens_per_second": round(alone.tokens_per_second, 1),
        "harmed_tokens_per_second": round(harmed.tokens_per_second, 1),
        "lost": round(lost, 4),
        "away": round(share, 4),
        "beyond": round(lost - share, 4),
    }


class Measured:
    """One run of the job, harmed or not."""

    def __init__(self, job_file: Path, run_dir: Path, settings: Sequence[str], skip: int) -> None:
        self._workers = load_job(job_file).rollout.workers
        self._skip = skip
        self.run = HarmedRun(run_dir, job_file, settings=settings)
        self.kills: list[Harm] = []
        self._seen_s: dict[int, float] = {}

    def until_the_end(self, every_s: float | None) -> Window:
        """Watch steps being committed; with ``every_s`` kill a worker in turn, from the first step that counts."""
        run, next_s = self.run, 0.0
        while not run.over:
            time.sleep(_POLL_S)
            self._look()
            if every_s is None or self._skip - 1 not in self._seen_s:
                continue
            next_s = next_s or self._seen_s[self._skip - 1] + every_s / 4
            if time.time() >= next_s:
                kill = run.harm_if_there(f"rollout-{len(self.kills) % self._workers}", signal.SIGKILL)
                if kill is not None:  # else it is still away: looked for again, until the run is over
                    self.kills.append(kill)
                    next_s += every_s
        self._look()
        run.finish()
        rows = run.rows()
        tokens = sum(row["tokens_trained"] for row in rows[self._skip :])
        return Window(self._seen_s[self._skip - 1], self._seen_s[rows[-1]["step"]], tokens)

    def _look(self) -> None:
        now_s = time.time()
        for row in self.run.rows():
            self._seen_s.setdefault(row["step"], now_s)


def measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Both runs, one after the other."""
    use_cores(options.cores)
    result: dict[str, Any] = {"hardware": hardware()}
    job_file = prepare_job(options.job, options.set or [], directory, options.model)
    job = load_job(job_file)
    settings = with_vocabulary(job_file) if job.rollout.engine == "simulated" else []
    windows: list[Window] = []
    runs: list[Measured] = []
    for name, every_s in (("alone", None), ("harmed", options.every_s)):
        print(f"{name}: {job.steps} steps", file=sys.stderr)
        runs.append(measured := Measured(job_file, directory / name, settings, options.skip))
        try:
            windows.append(measured.until_the_end(every_s))
        except AssertionError as error:
            raise BenchmarkFailed(str(error)) from error
        finally:
            measured.run.close()
    harmed = runs[1]
    away = away_s(harmed.kills, harmed.run.events(), windows[1])
    result |= compare(windows[0], windows[1], away, job.rollout.workers)
    result |= {
        "kills": len(away),
        "away_s": away,
        "seconds": [round(window.ended_s - window.began_s, 2) for window in windows],
        "rollout_idle_fraction": [_mean(run.run.rows()[options.skip :], "rollout_idle_fraction") for run in runs],
        "samples_migrated": harmed.run.rows()[-1]["samples_migrated"],
        "job": f"{job_text(job)}; {job.rollout.engine} engine, {job.rollout.workers} workers, {job.sync.mode}",
    }
    goal = f"beyond: {result['beyond']:.1%} of the throughput, the goal is {BEYOND_GOAL:.0%}"
    result["missed"] = [goal] if result["beyond"] > BEYOND_GOAL else []
    return result


def _mean(rows: Sequence[Row], key: str) -> float:
    return round(sum(float(row[key]) for row in rows) / len(rows), 4)


def parse(args: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line("chaos", __doc__)
    add_job_options(parser, ROOT / "benchmarks" / "jobs" / "chaos.yaml")
    parser.add_argument("--every-s", type=float, default=20.0, help="seconds between two kills")
    parser.add_argument("--skip", type=int, default=3, help="first steps that do not count")
    add_check_option(parser)
    return parser.parse_args(args)


def main(args: list[str]) -> int:
    """Measure and print; with ``--check`` hold the figure against its goal."""
    options = parse(args)
    return show_and_check(measured(measure, options), options, _print_table)


def _print_table(result: Result) -> None:
    print(f"{result['job']}; {result['hardware']['class']}; {result['kills']} kills")
    print(f"  alone {result['alone_tokens_per_second']}, harmed {result['harmed_tokens_per_second']} tokens/s")
    print(f"  lost {result['lost']:.1%}, of it away {result['away']:.1%}, beyond {result['beyond']:.1%}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
