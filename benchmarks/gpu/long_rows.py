"""What long packed rows cost in the trainer: attention in blocks against one dense mask.

    group   a group of eight with 16,384 distinct tokens in all     against a dense mask over the row
    each    a group of eight sequences of 16,384 tokens, of which   against each sequence by itself, in padded rows:
            12,288 are the prompt                                   a dense mask would take 2 GB, and as numbers 8
    shared  the group of ``group`` in one row of two ranks          against one rank, both of the sharded backend

Forward and backward of one micro-batch by the torch backend, each in a process of its own. Of ``shared`` the leader's
memory counts, and its ``gradient_difference`` is that of the gradients' norms, since no rank has all of a gradient.
``peak_added_mib`` is above
what the process held before, ``gradient_difference`` the largest of any weight over the largest gradient, and
``computed_of_distinct`` the positions that the model computes over the tokens that differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks._command import Result, add_check_option, command_line, measured, show_and_check
from benchmarks._jobs import hardware, last_line

CASES: Final = {"group": "dense", "each": "padded", "shared": "one_rank"}
"""What each case is held against."""
GOALS: Final = {"of_its_memory": 0.5, "gradient_difference": 1e-4, "computed_of_distinct": 1.05}
"""Most that is allowed; memory counts against a dense mask alone."""


def judged(case: str, rows: Result, other: Result, difference: float) -> Result:
    """One case: both runs, what of the other's memory and time long rows take, and goals that were not met."""
    found: Result = {
        "distinct_tokens": rows["distinct_tokens"],
        "computed_of_distinct": round(rows["computed_tokens"] / rows["distinct_tokens"], 4),
        "of_its_memory": round(rows["peak_added_mib"] / max(1, other["peak_added_mib"]), 3),
        "of_its_time": round(rows["seconds"] / other["seconds"], 3),
        "gradient_difference": float(f"{difference:.1e}"),
    }
    held = [name for name in GOALS if case == "group" or name != "of_its_memory"]
    missed = [
        f"{case}: {name} is {found[name]}, the goal is {GOALS[name]}" for name in held if found[name] > GOALS[name]
    ]
    return {_name(case): rows, CASES[case]: other, **found, "missed": missed}


def _name(case: str) -> str:
    return "two_ranks" if case == "shared" else "packed"


def difference(one: Path, other: Path) -> float:
    """Largest difference of two gradients over the largest gradient."""
    first, second = np.load(one), np.load(other)
    return float(np.abs(first - second).max() / np.abs(first).max())


def measure(options: argparse.Namespace, scratch: Path) -> Result:
    """All cases that were asked for."""
    result: Result = {"benchmark": "long_rows", "hardware": hardware(), "device": options.device, "missed": []}
    for case in options.cases.split(","):
        runs: dict[str, Result] = {}
        packed = "two_ranks" if case == "shared" else options.kind
        for kind in (CASES[case], packed):
            arguments = {
                "case": case, "kind": kind, "tokens": options.tokens, "device": options.device,
                "dtype": options.dtype, "scratch": str(scratch),
            }  # fmt: skip
            command = [sys.executable, "-m", "benchmarks.gpu._long_row", json.dumps(arguments)]
            runs[kind] = json.loads(last_line(command))
            print(f"{case:<6} {kind:<9} {json.dumps(runs[kind])}", file=sys.stderr, flush=True)
        apart = difference(*(scratch / f"{case}.{kind}.npy" for kind in runs))
        result[case] = judged(case, runs[packed], runs[CASES[case]], apart)
        result["missed"] += result[case]["missed"]
    return result


def parse(args: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line("long_rows", __doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="names, with commas")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--kind", choices=("blocks", "flex"), default="blocks", help="flex: on CUDA")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    add_check_option(parser)
    options = parser.parse_args(args)
    if unknown := [name for name in options.cases.split(",") if name not in CASES]:
        parser.error(f"--cases: there is no {unknown[0]!r}; expected some of {', '.join(CASES)}")
    return options


def main(args: list[str]) -> int:
    """Measure and print; with ``--check`` hold the figures against their goals."""
    options = parse(args)
    return show_and_check(measured(measure, options), options, _print_table)


def _print_table(result: Result) -> None:
    for case, other in CASES.items():
        found: Any = result.get(case)
        if not found:
            continue
        print(f"{case}: {found['distinct_tokens']} distinct tokens, computed {found['computed_of_distinct']} times")
        for kind in (_name(case), other):
            run = found[kind]
            print(f"  {kind:<9} {run['peak_added_mib']:>6} MiB added  {run['seconds']:>7.1f} s")
        print(
            f"  of its memory {found['of_its_memory']}  of its time {found['of_its_time']}"
            f"  gradients differ by {found['gradient_difference']}"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
