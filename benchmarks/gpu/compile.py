"""Time of a micro-batch, forward and backward, by the torch backend: layers as written, and ``trainer.compile``.

Each is a process of its own, with the same model and the same tokens. ``ratio`` is the time of compiled layers over
that of plain ones, ``start_ratio`` of their starts, in which layers are compiled, or loaded from where torch keeps
them. ``graphs`` counts what was compiled: all of it before the first timed pass.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Final

from benchmarks._command import Result, add_check_option, command_line, measured, show_and_check
from benchmarks._jobs import hardware, last_line

APART_MAX: Final = {"float32": 1e-5, "bfloat16": 1e-2}
"""Most that the gradient's norm may differ from that of plain layers, relative."""


def judged(plain: Result, compiled: Result, dtype: str) -> Result:
    """Both runs, the second beside the first, and goals that were not met: compiled, and the same gradient."""
    found: Result = {"plain": plain, "compiled": compiled, "missed": []}
    found["ratio"] = round(compiled["seconds"] / max(1e-9, plain["seconds"]), 3)
    found["cpu_ratio"] = round(compiled["cpu_s"] / max(1e-9, plain["cpu_s"]), 3)
    found["memory_ratio"] = round(compiled["added_bytes"] / max(1, plain["added_bytes"]), 3)
    found["start_ratio"] = round(compiled["start_s"] / max(1e-9, plain["start_s"]), 1)
    found["apart"] = abs(compiled["norm"] - plain["norm"]) / plain["norm"]
    if not found["apart"] <= APART_MAX[dtype]:
        found["missed"].append(f"the gradient's norm is {found['apart']:.1e} apart, the goal is {APART_MAX[dtype]}")
    if compiled["graphs"] == 0:
        found["missed"].append("nothing was compiled: the log says why")
    return found


def measure(options: argparse.Namespace, scratch: Path) -> Result:
    """Plain layers, then compiled ones."""
    from tests.tiny_checkpoint import make_tiny_checkpoint

    model = make_tiny_checkpoint(
        scratch / "model", hidden=options.hidden, layers=options.layers, heads=options.heads, max_position=2048
    )
    asked = {"way": options.recompute, "model_path": str(model), "tokens": options.tokens}
    asked |= {"device": options.device, "dtype": options.dtype}
    runs: list[Result] = []
    for compiled in (False, True):
        command = [sys.executable, "-m", "benchmarks.gpu._recompute", json.dumps({**asked, "compiled": compiled})]
        runs.append(json.loads(last_line(command)))
        print(f"{'compiled' if compiled else 'plain':<9} {json.dumps(runs[-1])}", file=sys.stderr, flush=True)
    shape = {"tokens": options.tokens, "hidden": options.hidden, "layers": options.layers}
    shape |= {"recompute": options.recompute, "dtype": options.dtype}
    found = {"benchmark": "compile", "hardware": hardware(), "device": options.device, **shape}
    return found | judged(runs[0], runs[1], options.dtype)


def main(args: list[str]) -> int:
    """Measure and print."""
    parser = command_line("compile", __doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--recompute", choices=("none", "whole"), default="none")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(APART_MAX), default="float32")
    add_check_option(parser)
    options = parser.parse_args(args)
    return show_and_check(measured(measure, options), options, _print_table)


def _print_table(result: Result) -> None:
    for name in ("plain", "compiled"):
        run = result[name]
        print(
            f"  {name:<9} {run['seconds']:>7.2f} s  {run['added_bytes'] / 2**20:>7.0f} MiB added"
            f"  start {run['start_s']:>6.1f} s  {run['graphs']} graphs"
        )
    print(f"  of the time {result['ratio']}, of the CPU {result['cpu_ratio']}, of the memory {result['memory_ratio']}")
    for line in result["missed"]:
        print(f"  missed: {line}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
