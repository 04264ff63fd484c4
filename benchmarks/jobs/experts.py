"""A mixture of experts with and without router replay: how far trainer and engine are apart, and what replay costs.

    quickstart, 8 experts a layer ─▶ model, made once ─┬─▶ headrace run, trainer.router_replay: false
                                                       └─▶ … true

Both runs take the same prompts in the same order from the same weights. Figures are means over the run's steps; the
reward is that of the first step and of the last fifth.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks._command import Result, add_job_options, command_line, measured, show
from benchmarks._jobs import hardware, job_text, prepare_job, run_headrace, use_cores
from benchmarks._processes import ROOT
from configs.loader import load_job
from configs.run_files import JOURNAL

MODEL: Final = ("model.experts=8", "algorithm.load_balancing=0.001")
SIDES: Final = {"without": "trainer.router_replay=false", "with": "trainer.router_replay=true"}


def measure(options: argparse.Namespace, directory: Path) -> Result:
    """Prepare, then one run a side."""
    use_cores(options.cores)
    print("preparing the model", file=sys.stderr)
    sets = [*MODEL, f"model.dtype={options.dtype}", *(options.set or [])]
    job_file = prepare_job(options.job, sets, directory, options.model)
    found: dict[str, Result] = {}
    for side, key in SIDES.items():
        print(f"{side} replay", file=sys.stderr)
        run_dir = (options.keep or directory) / side
        run = run_headrace(job_file, run_dir, [f"steps={options.steps}", key])
        found[side] = figures(run.rows) | {
            "journal_bytes_per_token": round(
                (run_dir / JOURNAL).stat().st_size / _sum(run.rows, "tokens_generated"), 1
            ),
            "lost": run.summary["prompts_lost"],
            "twice": run.summary["samples_trained_twice"],
        }
    ratio = found["with"]["engine_mismatch"] / found["without"]["engine_mismatch"]
    return {
        "hardware": hardware(),
        "job": job_text(load_job(job_file)),
        "dtype": options.dtype,
        "steps": options.steps,
        "replay": found,
        "mismatch_ratio": round(ratio, 3),
    }


def _bytes(run_dir: Path) -> int:
    return (run_dir / JOURNAL).stat().st_size


def figures(rows: Sequence[dict[str, Any]]) -> Result:
    """The figures of one run's steps."""
    last = rows[-max(1, len(rows) // 5) :]
    return {
        "engine_mismatch": float(f"{_mean(rows, 'engine_mismatch'):.4g}"),
        "expert_imbalance": [round(float(row["expert_imbalance"]), 3) for row in (rows[0], rows[-1])],
        "reward_first": round(float(rows[0]["reward_mean"]), 3),
        "reward_last": round(_mean(last, "reward_mean"), 3),
        "seconds": round(statistics.median(float(row["seconds"]) for row in rows), 3),
    }


def _mean(rows: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.fmean(float(row[key]) for row in rows)


def _sum(rows: Sequence[dict[str, Any]], key: str) -> float:
    return sum(float(row[key]) for row in rows)


def parse(args: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line("experts", __doc__)
    add_job_options(parser, ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--keep", type=Path, help="leave the run directories here, for headrace plot")
    return parser.parse_args(args)


def main(args: list[str]) -> int:
    """Measure and print."""
    options = parse(args)
    show(measured(measure, options), options, _print_table)
    return 0


def _print_table(result: Result) -> None:
    print(f"{result['job']}; {result['dtype']}; {result['hardware']['class']}; {result['steps']} steps")
    for side, row in result["replay"].items():
        print(
            f"{side + ' replay':15} {row['engine_mismatch']:.2e} nats apart   reward {row['reward_first']:.3f} -> "
            f"{row['reward_last']:.3f}   {row['seconds']:.2f} s a step   {row['journal_bytes_per_token']:.0f} bytes a "
            f"token in the journal   imbalance {row['expert_imbalance'][0]:.2f} -> {row['expert_imbalance'][1]:.2f}"
        )
    print(f"with replay {result['mismatch_ratio']:.2f} times as far apart")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
