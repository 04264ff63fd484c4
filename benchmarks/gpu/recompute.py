"""Memory and time of a micro-batch in each way of ``trainer.recompute``, by the torch backend.

Each way is a process of its own, with the same model and the same tokens. ``added_bytes`` is the peak of memory above
what the process held with weights and gradient sums in place; ``of_its_memory``, ``of_its_time`` and
``of_its_cpu``, the processor's time, are beside ``none``. ``offload`` is for CUDA.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Final

from benchmarks._command import Result, add_check_option, command_line, measured, show_and_check
from benchmarks._jobs import hardware, last_line
from configs.schema import RECOMPUTE_WAYS

APART_MAX: Final = {"float32": 1e-6, "bfloat16": 1e-2}
"""Most that the gradient's norm may differ from that of ``none``, relative."""


def judged(runs: dict[str, Result], dtype: str) -> Result:
    """The runs of all ways beside that of ``none``, and goals that were not met: less memory, the same gradient."""
    found: Result = {"missed": []}
    plain = runs["none"]
    for way, run in runs.items():
        found[way] = {
            **run,
            "of_its_memory": round(run["added_bytes"] / max(1, plain["added_bytes"]), 3),
            "of_its_time": round(run["seconds"] / max(1e-9, plain["seconds"]), 3),
            "of_its_cpu": round(run["cpu_s"] / max(1e-9, plain["cpu_s"]), 3),
        }
        apart = abs(run["norm"] - plain["norm"]) / plain["norm"]
        if not apart <= APART_MAX[dtype]:
            found["missed"].append(f"{way}: the gradient's norm is {apart:.1e} apart, the goal is {APART_MAX[dtype]}")
        if way != "none" and run["added_bytes"] >= plain["added_bytes"]:
            found["missed"].append(f"{way}: takes {found[way]['of_its_memory']} of the memory of none")
    return found


def measure(options: argparse.Namespace, scratch: Path) -> Result:
    """Every way that the device has."""
    from tests.tiny_checkpoint import make_tiny_checkpoint

    model = make_tiny_checkpoint(scratch / "model", hidden=options.hidden, layers=options.layers)
    runs: dict[str, Result] = {}
    for way in RECOMPUTE_WAYS if options.device == "cuda" else RECOMPUTE_WAYS[:-1]:
        asked = {"way": way, "model_path": str(model), "tokens": options.tokens}
        asked |= {"device": options.device, "dtype": options.dtype}
        runs[way] = json.loads(last_line([sys.executable, "-m", "benchmarks.gpu._recompute", json.dumps(asked)]))
        print(f"{way:<9} {json.dumps(runs[way])}", file=sys.stderr, flush=True)
    shape = {"tokens": options.tokens, "hidden": options.hidden, "layers": options.layers}
    return {"benchmark": "recompute", "hardware": hardware(), "device": options.device, **shape} | judged(
        runs, options.dtype
    )


def main(args: list[str]) -> int:
    """Measure and print."""
    parser = command_line("recompute", __doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(APART_MAX), default="float32")
    add_check_option(parser)
    options = parser.parse_args(args)
    return show_and_check(measured(measure, options), options, _print_table)


def _print_table(result: Result) -> None:
    for way in [name for name in RECOMPUTE_WAYS if name in result]:
        run = result[way]
        print(
            f"  {way:<9} {run['added_bytes'] / 2**20:>7.0f} MiB added {run['of_its_memory']:>6}"
            f"  {run['seconds']:>7.2f} s {run['of_its_time']:>6}  of its CPU {run['of_its_cpu']}"
        )
    for line in result["missed"]:
        print(f"  missed: {line}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
