"""What a seeding window is worth, live: the same job with it, with other machines' workers only, and on one machine.

    the job ─┬─ remote     its workers on other machines; the trainer's machine only trains
             ├─ colocated  no other machine; the trainer's own generates, then trains, in turns
             ├─ seeding    both: its own workers generate for a learned while, hand over, sleep, and it trains
             └─ estimated  with --estimated: the same, until the trainer would not wait (scheduling.seeding_end)

    samples/s = samples / seconds of all steps after the first few, in which the window is still sought

The engines are simulated, so that workers do not compete for two cores: a machine that generates adds what a machine
adds. The trainer is the real one, and so are processes, links, hand-over, ledger and weights. All runs are on-policy,
of the same prompts in the same order, and must lose nothing and train nothing twice.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks._command import Result, add_check_option, add_job_options, command_line, measured, show_and_check
from benchmarks._harm import with_vocabulary
from benchmarks._jobs import hardware, job_text, prepare_job, run_headrace, samples_per_second, use_cores
from benchmarks._processes import ROOT
from configs.loader import load_job
from supervisors.providers.trace_files import HEADER

WHERE: Final = ("remote", "colocated", "seeding")
ESTIMATED: Final = "estimated"
WINDOW: Final = ("scheduling.seeding=true", "scheduling.seeding_first_s=1", "scheduling.seeding_floor_s=0.1")
"""A step takes seconds here, not minutes."""
GOAL_RATIO: Final = 1.0
"""Least ratio of seeding to either of the others: it must not cost more than it gives."""
_SHOWN: Final = ("seconds", "seed_s", "seeding_target", "rollout_idle_fraction", "trainer_idle_fraction")


def write_trace(machines: int, file: Path) -> None:
    """So many machines, there from the beginning and for good."""
    rows = [f"0,machine-{i},up,spot" for i in range(machines)]
    file.write_text("\n".join([",".join(HEADER), *rows]) + "\n", encoding="utf-8")


def settings_for(where: str, trace: Path) -> list[str]:
    """What makes the job generate there."""
    others = ["cluster.place_rollout=elastic", "provider.kind=local", f"provider.trace={trace}"]
    if where == "remote":
        return [*others, "rollout.workers=0"]
    if where == "seeding":
        return [*others, *WINDOW]
    if where == ESTIMATED:
        return [*others, *WINDOW, "scheduling.seeding_end=estimated"]
    return ["cluster.place_rollout=local", *WINDOW]


def measure_run(job_file: Path, run_dir: Path, settings: Sequence[str], skip: int) -> Result:
    """One run, and what it says of itself."""
    run = run_headrace(job_file, run_dir, settings)
    steady = run.rows[skip:] or run.rows
    result: Result = {"samples_per_second": round(samples_per_second(run.rows, skip), 1)}
    result |= {
        name: round(statistics.fmean(float(row[name]) for row in steady), 3) for name in _SHOWN if name in steady[-1]
    }
    return result | {name: run.summary[name] for name in ("prompts_lost", "samples_trained_twice")}


def compared(runs: dict[str, Result]) -> Result:
    """Seeding's samples a second over those of the others, and goals that were not met, in sentences."""
    speed = {where: float(run["samples_per_second"]) for where, run in runs.items()}
    ratios = {f"over_{where}": round(speed["seeding"] / speed[where], 3) for where in ("remote", "colocated")}
    missed = [f"{name}: {ratio}, the goal is {GOAL_RATIO}" for name, ratio in ratios.items() if ratio < GOAL_RATIO]
    if ESTIMATED in runs:
        ratios["estimated_over_seeding"] = round(speed[ESTIMATED] / speed["seeding"], 3)
    for where, run in runs.items():
        missed += [f"{where}: {name} is {run[name]}" for name in ("prompts_lost", "samples_trained_twice") if run[name]]
    return ratios | {"missed": missed}


def measure(options: argparse.Namespace, directory: Path) -> Result:
    """Prepare, then one run of each."""
    use_cores(options.cores)
    result: Result = {"benchmark": "seeding", "hardware": hardware()}
    write_trace(options.machines, trace := directory / "trace.csv")
    job_file = prepare_job(options.job, options.set or [], directory, options.model)
    job = load_job(job_file)
    common = [f"steps={options.steps}"] + (with_vocabulary(job_file) if job.rollout.engine == "simulated" else [])
    runs: dict[str, Result] = {}
    for where in (*WHERE, ESTIMATED) if options.estimated else WHERE:
        print(where, file=sys.stderr)
        settings = [*common, *settings_for(where, trace)]
        runs[where] = measure_run(job_file, (options.keep or directory) / where, settings, options.skip)
    result |= {"runs": runs, "machines": options.machines, "steps": options.steps, **compared(runs)}
    return result | {"job": f"{job_text(job)}; {job.rollout.engine} engine, {job.sync.mode}"}


def parse(args: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line("seeding", __doc__)
    add_job_options(parser, ROOT / "benchmarks" / "jobs" / "seeding.yaml")
    parser.add_argument("--machines", type=int, default=2, help="other than the trainer's")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--skip", type=int, default=12, help="first steps that do not count")
    parser.add_argument("--estimated", action="store_true", help="a fourth run; the job needs a length ranking")
    parser.add_argument("--keep", type=Path, help="leave the run directories here, for headrace plot")
    add_check_option(parser)
    return parser.parse_args(args)


def main(args: list[str]) -> int:
    """Measure and print; with ``--check`` hold the figures against their goals."""
    options = parse(args)
    return show_and_check(measured(measure, options), options, _print_table)


def _print_table(result: Result) -> None:
    print(f"{result['job']}; {result['machines']} other machines; {result['hardware']['class']}")
    for where, run in result["runs"].items():
        idle = f"idle: workers {run['rollout_idle_fraction']:.0%}, trainer {run['trainer_idle_fraction']:.0%}"
        window = f"  window {run['seed_s']:.2f} s" if run.get("seed_s") else ""
        print(f"  {where:<10} {run['samples_per_second']:>8.1f} samples/s  {idle}{window}")
    print(f"  seeding over remote {result['over_remote']:.2f}, over colocated {result['over_colocated']:.2f}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
