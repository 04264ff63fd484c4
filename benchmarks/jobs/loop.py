"""Overhead: samples per second of the whole system against one bare process, on the same cores.

    model, made once ─┬─▶ bare_loop, one process for each setting of torch's threads; the fastest one counts
                      └─▶ headrace run --json, in sync and in async mode

    samples/s = samples / seconds of all steps after the first few; ratio = ours / the loop's

Both take the same prompts in the same order, start from the same weights and learn at the same rate, so that step n
is about the same work in both, whatever the job: ``loop.yaml`` beside this file, unless ``--job`` names another.
Neither takes checkpoints. ``--repeats`` alternates the two and reports medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks import _baseline
from benchmarks._baseline import TOLERANCE, Ratio
from benchmarks._command import Result, add_job_options, command_line, measured, show
from benchmarks._jobs import (
    hardware,
    job_text,
    last_line,
    model_of,
    prepare_job,
    run_headrace,
    samples_per_second,
    settings_for,
    use_cores,
)
from benchmarks._processes import ROOT
from configs.loader import load_job

THREAD_SETTINGS: Final = ("1:1", "2:2", "1:2")
FLOORS: Final = {"sync": 0.9, "async": 1.0}
"""What the ratios must not fall below on a quiet machine, whatever the baseline says."""


def measure_loop(job_file: Path, steps: int, skip: int, settings: Sequence[str]) -> Result:
    """The bare loop with each setting of threads; the fastest one's figures, with its mean step in parts."""
    runs: list[Result] = []
    for threads in settings:
        command = [sys.executable, "-m", "benchmarks.jobs.bare_loop", str(job_file), "--model", str(model_of(job_file))]
        runs.append(json.loads(last_line([*command, "--steps", str(steps), "--threads", threads])))
    best = max(runs, key=lambda run: samples_per_second(run["steps"], skip))
    parts = {key: _mean(best["steps"][skip:] or best["steps"], key) for key in ("generate_s", "score_s", "train_s")}
    return {
        "samples_per_second": samples_per_second(best["steps"], skip),
        "threads": best["threads"],
        "step": parts,
        "reward_last": _mean(best["steps"][-5:], "reward_mean"),
    }


def measure_ours(job_file: Path, run_dir: Path, mode: str, steps: int, skip: int) -> Result:
    """Headrace in one mode, and what it says of itself."""
    run = run_headrace(job_file, run_dir, [f"steps={steps}", f"sync.mode={mode}", *settings_for(mode)])
    steady = run.rows[skip:] or run.rows
    return {
        "samples_per_second": samples_per_second(run.rows, skip),
        "rollout_idle_fraction": _mean(steady, "rollout_idle_fraction"),
        "trainer_idle_fraction": _mean(steady, "trainer_idle_fraction"),
        "reward_last": run.summary["reward_last"],
        "prompts_lost": run.summary["prompts_lost"],
        "samples_trained_twice": run.summary["samples_trained_twice"],
    }


def _mean(rows: Sequence[Result], key: str) -> float:
    return round(statistics.fmean(float(row[key]) for row in rows), 4)


def compare(ours: Sequence[Result], loops: Sequence[Result]) -> Result:
    """Medians of repeated runs, and their ratio; and each run's speed, for the medians hide how far they lie apart."""
    our_speeds, loop_speeds = ([run["samples_per_second"] for run in runs] for runs in (ours, loops))
    our_speed, loop_speed = statistics.median(our_speeds), statistics.median(loop_speeds)
    return {
        "ours_samples_per_second": round(our_speed, 1),
        "loop_samples_per_second": round(loop_speed, 1),
        "ratio": round(our_speed / loop_speed, 3),
        "each": {"ours": [round(speed) for speed in our_speeds], "loop": [round(speed) for speed in loop_speeds]},
        "ours": ours[-1],
    }


def check(
    result: Result, baseline: Result | None, *, floors: dict[str, float] = FLOORS, tolerance: float = TOLERANCE
) -> list[str]:
    """What is worse than it may be, in sentences: a ratio below its floor, or too far below the baseline's."""
    return _baseline.check(result, baseline, _ratios(floors, tolerance))


def _ratios(floors: dict[str, float] = FLOORS, tolerance: float = TOLERANCE) -> list[Ratio]:
    return [Ratio(f"{mode}.ratio", floor=floor, tolerance=tolerance) for mode, floor in floors.items()]


def baseline_name(job: Path) -> str:
    """Under which the baseline of this job is kept."""
    return "loop" if job.stem == "loop" else f"loop-{job.stem}"


def measure(options: argparse.Namespace, directory: Path) -> Result:
    """Prepare, alternate the contestants, compare."""
    use_cores(options.cores)
    result: Result = {"hardware": hardware()}
    print("preparing the model", file=sys.stderr)
    job_file = prepare_job(options.job, options.set or [], directory, options.model)
    modes = ("sync", "async") if options.mode == "both" else (options.mode,)
    ours: dict[str, list[Result]] = {mode: [] for mode in modes}
    loops: list[Result] = []
    settings: Sequence[str] = options.threads.split(",")
    for repeat in range(options.repeats):
        print(f"repeat {repeat}: bare loop", file=sys.stderr)
        loops.append(measure_loop(job_file, options.steps, options.skip, settings))
        for mode in modes:
            print(f"repeat {repeat}: headrace, {mode}", file=sys.stderr)
            ours[mode].append(measure_ours(job_file, directory / f"{mode}-{repeat}", mode, options.steps, options.skip))
    result |= {mode: compare(ours[mode], loops) for mode in modes}
    result |= {
        "loop": loops[-1],
        "job": job_text(load_job(job_file)),
        "steps": options.steps,
        "repeats": options.repeats,
    }
    return result


def parse(args: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line("loop", __doc__)
    add_job_options(parser, ROOT / "benchmarks" / "jobs" / "loop.yaml")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--skip", type=int, default=5, help="first steps that do not count")
    parser.add_argument("--mode", choices=("sync", "async", "both"), default="both")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument(
        "--threads", default=",".join(THREAD_SETTINGS), help="generate:train settings that the loop may try"
    )
    _baseline.add_options(parser)
    return parser.parse_args(args)


def main(args: list[str]) -> int:
    """Measure, print, and with ``--check`` compare with the baseline of this class of machine."""
    options = parse(args)
    result = measured(measure, options)
    code = _baseline.settle(result, baseline_name(options.job), _ratios(), options)
    show(result, options, _print_table)
    return code


def _print_table(result: Result) -> None:
    print(f"{result['job']}; {result['hardware']['class']}; {result['steps']} steps")
    for mode in FLOORS:
        if mode in result:
            row = result[mode]
            print(
                f"  {mode:<6} ours {row['ours_samples_per_second']:>8.1f}  loop {row['loop_samples_per_second']:>8.1f}"
                f" samples/s  ratio {row['ratio']:.2f}"
            )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
