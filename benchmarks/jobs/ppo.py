"""PPO beside one bare process that does the same: the same curve, and how many samples a second.

    model and reward model, made once ─ for each seed ─┬─▶ bare_ppo, one process, with torch's fastest threads
                                                       └─▶ headrace run --json

Rewards: the mean over the last quarter of the steps, for each seed; the two contestants have learned the same if their
means over seeds are no further apart than the seeds of one of them are. Samples/s: of the steps after the first few;
the ratio is the median over seeds. The two draw other responses, so no two curves are equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from actors.host.thread_pool import let_waiting_threads_rest
from benchmarks._command import Result, add_check_option, add_job_options, command_line, measured, show_and_check
from benchmarks._jobs import (
    hardware,
    job_text,
    last_line,
    model_of,
    prepare_job,
    run_headrace,
    samples_per_second,
    use_cores,
)
from benchmarks._processes import ROOT
from benchmarks.jobs.loop import THREAD_SETTINGS
from configs.loader import load_job

RATIO_MIN: Final = 0.9
PROBE_STEPS: Final = 6
REWARDS: Final = {"learned": (), "verifier": ("reward={kind: reasoning_gym}",)}
"""Overrides of the job file for each kind of reward."""
Steps = Sequence[dict[str, Any]]


def measure(options: argparse.Namespace, directory: Path) -> Result:
    """Prepare, run both for each seed, compare."""
    use_cores(options.cores)
    result: Result = {"hardware": hardware()}
    print("preparing the models", file=sys.stderr)
    job_file = prepare_job(options.job, [*REWARDS[options.reward], *(options.set or [])], directory, options.model)
    threads = fastest(job_file, options.threads.split(","))
    ours, bare = list[Steps](), list[Steps]()
    lost = twice = 0
    for seed in range(options.seeds):
        sets = [f"steps={options.steps}", f"seed={seed}"]
        print(f"seed {seed}: bare loop", file=sys.stderr)
        bare.append(_bare(job_file, sets, threads))
        print(f"seed {seed}: headrace", file=sys.stderr)
        run = run_headrace(job_file, directory / f"seed-{seed}", sets)
        ours.append(run.rows)
        lost, twice = lost + run.summary["prompts_lost"], twice + run.summary["samples_trained_twice"]
    result |= compare(ours, bare, options.skip) | {"lost": lost, "twice": twice}
    result |= {
        "job": job_text(load_job(job_file)),
        "reward": options.reward,
        "steps": options.steps,
        "seeds": options.seeds,
        "threads": threads,
    }
    return result | {"missed": missed(result)}


def fastest(job_file: Path, settings: Sequence[str]) -> str:
    """The setting of threads with which the bare loop trains most samples a second."""
    if len(settings) == 1:
        return settings[0]
    print("the bare loop's threads", file=sys.stderr)
    speeds = {each: samples_per_second(_bare(job_file, [f"steps={PROBE_STEPS}"], each), 2) for each in settings}
    return max(speeds, key=lambda each: speeds[each])


def _bare(job_file: Path, overrides: Sequence[str], threads: str) -> Steps:
    command = [sys.executable, "-m", "benchmarks.jobs.bare_ppo", str(job_file), "--model", str(model_of(job_file))]
    sets = [part for override in overrides for part in ("--set", override)]
    return json.loads(last_line([*command, "--threads", threads, *sets]))["steps"]


def compare(ours: Sequence[Steps], bare: Sequence[Steps], skip: int) -> Result:
    """The figures of both, a list entry a seed; each of ``ours`` and ``bare`` is one seed's steps."""
    both = {"ours": ours, "bare": bare}
    ends = {name: [_last_quarter(run, "reward_mean") for run in runs] for name, runs in both.items()}
    spread = max(max(seeds) - min(seeds) for seeds in ends.values())
    means = {name: statistics.fmean(seeds) for name, seeds in ends.items()}
    speeds = {name: [samples_per_second(run, skip) for run in runs] for name, runs in both.items()}
    ratios = [one / other for one, other in zip(speeds["ours"], speeds["bare"], strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "samples_per_second": {name: [round(speed, 1) for speed in each] for name, each in speeds.items()},
        "reward_first": {name: [round(run[0]["reward_mean"], 3) for run in runs] for name, runs in both.items()},
        "reward_last_quarter": {name: [round(end, 3) for end in each] for name, each in ends.items()},
        "reward_difference": round(means["ours"] - means["bare"], 3),
        "reward_spread": round(spread, 3),
        "kl_last_quarter": {
            name: [round(_last_quarter(run, "kl_per_response"), 3) for run in runs] for name, runs in both.items()
        },
        "curves": {
            name: [[round(row["reward_mean"], 3) for row in run] for run in runs] for name, runs in both.items()
        },
    }


def _last_quarter(run: Steps, key: str) -> float:
    return statistics.fmean(float(row[key]) for row in run[-max(1, len(run) // 4) :])


def missed(result: Result) -> list[str]:
    """Goals that were not reached, in sentences."""
    found = [f"{key} is {result[key]}" for key in ("lost", "twice") if result[key]]
    if result["ratio"] < RATIO_MIN:
        found.append(f"ratio is {result['ratio']}, goal {RATIO_MIN}")
    if abs(result["reward_difference"]) > result["reward_spread"]:
        found.append(f"rewards end {result['reward_difference']} apart, seeds {result['reward_spread']}")
    return found


def main(args: list[str]) -> int:
    """Measure and print; with ``--check``, 1 if a goal is missed."""
    parser = command_line("ppo", __doc__)
    add_job_options(parser, ROOT / "benchmarks" / "jobs" / "ppo.yaml")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--skip", type=int, default=5, help="first steps that do not count for the speed")
    parser.add_argument(
        "--reward", choices=list(REWARDS), default="learned", help="a reward model of made preferences, or the task's"
    )
    parser.add_argument(
        "--threads", default=",".join(THREAD_SETTINGS), help="generate:train settings that the bare loop may try"
    )
    add_check_option(parser)
    options = parser.parse_args(args)
    let_waiting_threads_rest()  # in the processes of both, before they import torch
    return show_and_check(measured(measure, options), options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
