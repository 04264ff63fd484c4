"""Modes of consumption against each other, live: samples per second of one job in each of them, on the same cores.

    long-tailed data ─▶ model, made once ─┬─▶ headrace run, sync ─▶ the baseline
                                          ├─▶ … minibatch, dynamic: on-policy
                                          └─▶ … one_step_barrier, async: one step off-policy

    samples/s = samples / seconds of all steps after the first few; ratio = a mode's / the baseline's

All runs take the same prompts in the same order from the same weights. On two cores generation and training share what
they have, so an overlap saves the time in which a core would idle, and no more: the tail of a step, the hand-over of
weights. ``--set`` applies to all runs, such as ``--set rollout.length_ranking=learned``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks._command import Result, add_job_options, command_line, measured, show
from benchmarks._jobs import (
    hardware,
    job_text,
    prepare_job,
    run_headrace,
    samples_per_second,
    settings_for,
    use_cores,
)
from benchmarks._processes import ROOT
from benchmarks.peers.long_tail import write_rows
from configs.loader import load_job

JOB: Final = ROOT / "benchmarks" / "peers" / "long_tail.yaml"
MODES: Final = ("sync", "minibatch", "dynamic", "one_step_barrier", "async")
BASELINES: Final = ("sync", "minibatch")


def measure_mode(job_file: Path, run_dir: Path, mode: str, steps: int, skip: int) -> Result:
    """One run, and what it says of itself."""
    run = run_headrace(job_file, run_dir, [f"steps={steps}", f"sync.mode={mode}", *settings_for(mode)])
    steady = run.rows[skip:] or run.rows
    shown = ["rollout_idle_fraction", "trainer_idle_fraction", "seconds", "response_tokens_max"]
    shown += [name for name in ("length_recall_20", "length_known_fraction") if name in steady[-1]]
    result: Result = {"samples_per_second": round(samples_per_second(run.rows, skip), 1)}
    result |= {name: round(statistics.fmean(float(row[name]) for row in steady), 4) for name in shown}
    result |= {name: run.summary[name] for name in ("reward_last", "prompts_lost", "samples_trained_twice")}
    return result


def ratios(result: dict[str, Result]) -> dict[str, dict[str, float]]:
    """Mode → baseline → samples per second over the baseline's."""
    return {
        mode: {
            base: round(figures["samples_per_second"] / result[base]["samples_per_second"], 3)
            for base in BASELINES
            if base in result
        }
        for mode, figures in result.items()
    }


def measure(options: argparse.Namespace, directory: Path) -> Result:
    """Prepare, then one run a mode and repeat."""
    use_cores(options.cores)
    found: Result = {"hardware": hardware()}
    overrides = list(options.set or [])
    if options.job == JOB:
        write_rows(directory / "long_tail.jsonl")
        overrides.append(f"data.path={directory / 'long_tail.jsonl'}")
    print("preparing the model", file=sys.stderr)
    job_file = prepare_job(options.job, overrides, directory, options.model)
    runs: dict[str, list[Result]] = {mode: [] for mode in options.modes.split(",")}
    for repeat in range(options.repeats):
        for mode, results in runs.items():
            print(f"repeat {repeat}: {mode}", file=sys.stderr)
            run_dir = (options.keep or directory) / f"{mode}-{repeat}"
            results.append(measure_mode(job_file, run_dir, mode, options.steps, options.skip))
    middle = {mode: sorted(results, key=_speed)[len(results) // 2] for mode, results in runs.items()}
    job = load_job(job_file)
    found |= {"modes": middle, "ratios": ratios(middle), "steps": options.steps, "repeats": options.repeats}
    found["job"] = f"{job.name}: {job_text(job)}"
    return found


def _speed(result: Result) -> float:
    return float(result["samples_per_second"])


def parse(args: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line("modes", __doc__)
    add_job_options(parser, JOB)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--skip", type=int, default=5, help="first steps that do not count")
    parser.add_argument("--repeats", type=int, default=1, help="medians are reported")
    parser.add_argument("--keep", type=Path, help="leave the run directories here, for headrace plot")
    options = parser.parse_args(args)
    if unknown := sorted(set(options.modes.split(",")) - set(MODES)):
        parser.error(f"--modes: {', '.join(unknown)}; there are {', '.join(MODES)}")
    return options


def main(args: list[str]) -> int:
    """Measure and print."""
    options = parse(args)
    result = measured(measure, options)
    show(result, options, _print_table)
    return 0


def _print_table(result: Result) -> None:
    print(f"{result['job']}; {result['hardware']['class']}; {result['steps']} steps")
    for mode, figures in result["modes"].items():
        against = "  ".join(f"{ratio:.2f} of {base}" for base, ratio in result["ratios"][mode].items())
        idle = f"idle: workers {figures['rollout_idle_fraction']:.0%}, trainer {figures['trainer_idle_fraction']:.0%}"
        print(f"  {mode:<17} {figures['samples_per_second']:>8.1f} samples/s  {against}  {idle}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
