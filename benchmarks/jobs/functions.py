"""What generation costs that is paid for only while it works, and how long a step takes, on real processes.

    the job ─┬─ fixed    three workers, always awake and always paid
             ├─ lambda   functions, planned by weighted time and cost (RLHFless)
             └─ pareto   functions, the cheapest plan that is no more than 5 % slower than the fastest

    bill     fixed: three times the seconds of the steps; functions: the rows' billed_worker_s, start orders to ends,
             rounded up, asleep ones at a tenth
    counted  the steps after the first ``--skip``: before them nothing is measured, and all functions are started
    break-even cold start
             if none slept between steps and each step started all that its plan wants, each start would be billed:
             (bill of fixed − worker-seconds in which functions generated) / functions of a plan, all of them per step

Beside each bill stands the paper's, ``compute``: of fixed, three times the seconds of generation; of functions, the
seconds in which each generated. Same prompts, lengths and order in all runs. Nothing may be lost or trained twice.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks._command import Result, add_check_option, add_job_options, command_line, measured, show_and_check
from benchmarks._harm import percentile, with_vocabulary
from benchmarks._jobs import BenchmarkFailed, hardware, prepare_job, run_headrace, use_cores
from benchmarks._processes import ROOT
from supervisors.testing.run_under_test import RunRecord

WORKERS: Final = 3
"""Workers of the fixed run: RLHFless's best static number."""
FIXED: Final = (
    f"rollout.workers={WORKERS}", "scheduling.policy=assign", "scheduling.workers_max=null", "provider.kind=none",
    "cluster.place_rollout=local", "scheduling.plan={}",
)  # fmt: skip
ARMS: Final = {
    "fixed": FIXED,
    "lambda": ("scheduling.plan.choose=lambda",),
    "pareto": ("scheduling.plan.choose=pareto",),
}
GOAL_CUT: Final = 0.35
GOAL_RATIO: Final = 1.05
"""One of ours has to cut the bill by that part, in steps that are no longer than this times the fixed ones."""
Row = dict[str, Any]


def write_prompts(file: Path, count: int) -> None:
    """So many prompts; their lengths are drawn by the engines."""
    lines = [json.dumps({"prompt": f"question {number}", "answer": str(number)}) for number in range(count)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def figures(arm: str, rows: Sequence[Row]) -> Result:
    """What the counted steps of a run come to, a step."""
    steps = len(rows)
    seconds = sum(row["seconds"] for row in rows)
    generated_s = sum(row["seconds"] * row["trainer_idle_fraction"] for row in rows)
    planned = [row for row in rows if "plan_workers" in row]
    billed_s = sum(row["billed_worker_s"] for row in planned) if planned else WORKERS * seconds
    compute_s = sum(row["compute_worker_s"] for row in planned) if planned else WORKERS * generated_s
    return {
        "arm": arm,
        "steps": steps,
        "step_s": round(seconds / steps, 3),
        "generation_s": round(generated_s / steps, 3),
        "billed_worker_s": round(billed_s / steps, 3),
        "compute_worker_s": round(compute_s / steps, 3),
        "workers": round(statistics.mean(row["plan_workers"] for row in planned) if planned else WORKERS, 2),
        "functions_started": sum(row["functions_started"] for row in planned),
        "functions_cold_s": round(sum(row["functions_cold_s"] for row in planned), 1),
        "cut_samples": sum(row["plan_cut_samples"] for row in planned),
        "wake_s": round(statistics.mean(row["plan_wake_s"] for row in planned), 3) if planned else 0.0,
        "forecast_ratio": round(
            statistics.mean(row["plan_forecast_s"] / row["plan_generation_s"] for row in planned), 3
        ) if planned else 1.0,
        "tokens": sum(row["tokens_generated"] for row in rows),
    }  # fmt: skip


def compared(fixed: Result, ours: Result, name: str) -> Result:
    """One of ours against the fixed run."""
    return {
        f"cost_cut_{name}": round(1.0 - ours["billed_worker_s"] / fixed["billed_worker_s"], 3),
        f"step_ratio_{name}": round(ours["step_s"] / fixed["step_s"], 3),
        f"compute_cut_{name}": round(1.0 - ours["compute_worker_s"] / fixed["compute_worker_s"], 3),
        f"break_even_{name}": round((fixed["billed_worker_s"] - ours["compute_worker_s"]) / ours["workers"], 2),
    }


def missed(result: Result) -> list[str]:
    """Goals that were not met, in sentences."""
    found = [f"{name}: {result[name]}, the goal is 0" for name in ("lost", "twice", "violations") if result[name]]
    pairs = [(result[f"cost_cut_{arm}"], result[f"step_ratio_{arm}"]) for arm in ("lambda", "pareto")]
    if not any(cut >= GOAL_CUT and ratio <= GOAL_RATIO for cut, ratio in pairs):
        found.append(f"cost cut and step ratio: {pairs}, the goal is {GOAL_CUT} at {GOAL_RATIO} at most")
    return found


def measure(options: argparse.Namespace, directory: Path) -> Result:
    """The runs, one after the other."""
    use_cores(options.cores)
    result: Result = {"benchmark": "functions", "hardware": hardware()}
    prompts = directory / "prompts.jsonl"
    write_prompts(prompts, options.prompts)
    wanted = [*(options.set or []), f"data.path={prompts}", f"algorithm.prompts_per_step={options.prompts}"]
    job_file = prepare_job(options.job, wanted, directory, options.model)
    settings = with_vocabulary(job_file)
    found: dict[str, Result] = {}
    plans_ms: list[float] = []
    result |= {"lost": 0, "twice": 0, "violations": 0}
    for arm in options.arms:
        print(f"{arm} …", file=sys.stderr)
        run = run_headrace(job_file, directory / arm, [*settings, *ARMS[arm]])
        rows = run.rows[options.skip :]
        if not rows:
            raise BenchmarkFailed(f"{len(run.rows)} steps, of which the first {options.skip} are not counted")
        record = RunRecord(directory / arm)
        found[arm] = figures(arm, rows) | {
            "plans": [row["seconds_and_cost"] for row in record.events("step_planned")][-1:]
        }
        plans_ms += [row["plan_ms"] for row in rows if "plan_ms" in row]
        result["lost"] += run.summary["prompts_lost"]
        result["twice"] += run.summary["samples_trained_twice"]
        result["violations"] += len(record.report(must_finish=True).violations)
    if plans_ms:
        result["planning_p99_ms"] = round(percentile(plans_ms, 0.99), 3)
    for arm in ("lambda", "pareto"):
        if {"fixed", arm} <= found.keys():
            result |= compared(found["fixed"], found[arm], arm)
    result["runs"] = list(found.values())
    if set(ARMS) <= found.keys():
        result["break_even_cold_start_s"] = max(result.pop("break_even_lambda"), result.pop("break_even_pareto"))
        result["missed"] = missed(result)
    else:
        result["missed"] = []
    return result


def parse(args: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line("functions", __doc__)
    add_job_options(parser, ROOT / "benchmarks" / "jobs" / "functions.yaml")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="which runs")
    parser.add_argument("--prompts", type=int, default=32, help="of a step, which is an epoch of them")
    parser.add_argument("--skip", type=int, default=2, help="steps at the start that do not count")
    add_check_option(parser)
    return parser.parse_args(args)


def main(args: list[str]) -> int:
    """Measure and print; with ``--check`` hold the figures against their goals."""
    options = parse(args)
    return show_and_check(measured(measure, options), options, _print_table)


def _print_table(result: Result) -> None:
    names = [name for name in result["runs"][0] if name != "arm"]
    print(f"  {'a step':<20}" + "".join(f"{run['arm']:>12}" for run in result["runs"]))
    for name in names:
        print(f"  {name:<20}" + "".join(f"{run[name]:>12}" for run in result["runs"]))
    for name, value in result.items():
        if name not in ("benchmark", "hardware", "runs", "note"):
            print(f"  {name:<28} {value}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
