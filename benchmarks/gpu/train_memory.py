"""Memory and time of a head's log-probabilities and their gradients: in blocks, beside whole logits, in one run.

    hidden[U, H], weight[V, H] ─┬─▶ whole logits [U, V], as for heads that cannot be computed in blocks ─┐
                                └─▶ blocks of tokens, logits computed again in the backward pass        ─┴─▶ backward

Each measurement is a process of its own. ``added_bytes`` is the peak of its memory above what it had with weights,
hidden states and gradient sums in place; on a device, of the device's. ``ratio`` is that of blocks over whole logits,
``growth`` what blocks add to the peak for four times as many tokens. Goals, of the sizes that are the default:
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks._command import Result, add_check_option, command_line, measured, show_and_check
from benchmarks._jobs import hardware, last_line

DTYPES: Final = ("float32", "bfloat16")
RATIO_MAX: Final = {"float32": 0.35, "bfloat16": 0.6}
GROWTH_MAX: Final = 0.05
TIME_MAX: Final = 1.15
MORE_TOKENS: Final = 4
APART_MAX: Final = {"float32": 1e-5, "bfloat16": 1e-2}
"""Most that sums of log-probabilities and norms of gradients may differ, relative."""


def measure(options: argparse.Namespace, _scratch: Path) -> Result:
    """Both ways in each dtype, and blocks with more tokens."""
    result: Result = {"hardware": hardware(), "tokens": options.tokens, "vocabulary": options.vocabulary}
    result |= {"hidden": options.hidden, "device": options.device}
    dtypes = options.dtypes.split(",")
    for dtype in dtypes:
        whole, blocks = (_one(options, way, dtype, options.tokens) for way in ("whole", "blocks"))
        result[dtype] = compared(whole, blocks)
    dtype = dtypes[-1]
    more = _one(options, "blocks", dtype, MORE_TOKENS * options.tokens)
    fewer = result[dtype]["blocks"]["added_bytes"]
    result["growth"] = {"dtype": dtype, "tokens": MORE_TOKENS * options.tokens, **more}
    result["growth"]["share"] = round(more["added_bytes"] / max(1, fewer) - 1.0, 3)
    result["missed"] = missed(result)
    return result


def _one(options: argparse.Namespace, way: str, dtype: str, tokens: int) -> Result:
    asked = {"way": way, "dtype": dtype, "tokens": tokens, "threads": len(os.sched_getaffinity(0))}
    asked |= {"device": options.device, "vocabulary": options.vocabulary, "hidden": options.hidden}
    found: Result = json.loads(last_line([sys.executable, "-m", "benchmarks.gpu._head_memory", json.dumps(asked)]))
    print(f"{way:<7} {dtype:<9} {tokens:>6} {json.dumps(found)}", file=sys.stderr, flush=True)
    return found


def compared(whole: Result, blocks: Result) -> Result:
    """Both ways' figures, and blocks' over whole logits'."""
    ratios = {name: round(blocks[key] / max(1e-9, whole[key]), 3) for name, key in _FIGURES.items()}
    pairs = zip([whole["logprobs"], *whole["gradients"]], [blocks["logprobs"], *blocks["gradients"]], strict=True)
    apart = max(abs(one - other) / max(1e-9, abs(one)) for one, other in pairs)
    return {"whole": whole, "blocks": blocks, **ratios, "apart": apart}


_FIGURES: Final = {"ratio": "added_bytes", "time_ratio": "seconds", "cpu_ratio": "cpu_s"}


def missed(result: Result) -> list[str]:
    """Goals that are not reached, in sentences."""
    found: list[str] = []
    for dtype in [name for name in DTYPES if name in result]:
        figures: dict[str, Any] = result[dtype]
        if figures["ratio"] > RATIO_MAX[dtype]:
            found.append(f"{dtype}: {figures['ratio']} of the memory of whole logits, the goal is {RATIO_MAX[dtype]}")
        if figures["time_ratio"] > TIME_MAX:
            found.append(f"{dtype}: {figures['time_ratio']} of the time of whole logits, the goal is {TIME_MAX}")
        if figures["apart"] > APART_MAX[dtype]:
            found.append(f"{dtype}: sums are {figures['apart']:.1e} apart, the goal is {APART_MAX[dtype]}")
    if result["growth"]["share"] > GROWTH_MAX:
        found.append(f"memory grows by {result['growth']['share']} of itself, the goal is {GROWTH_MAX}")
    return found


def print_table(result: Result) -> None:
    """Two lines a dtype."""
    for dtype in [name for name in DTYPES if name in result]:
        for way in ("whole", "blocks"):
            one = result[dtype][way]
            print(f"  {dtype:<9} {way:<7} {one['added_bytes'] / 2**20:>8.0f} MiB {one['seconds']:>8.1f} s")
        print(f"  {dtype:<9} ratio   {result[dtype]['ratio']:>8.2f}     {result[dtype]['time_ratio']:>8.2f}")
    growth = result["growth"]
    print(f"  {growth['dtype']:<9} {growth['tokens']} tokens: {growth['share']:+.1%} of the memory of blocks")
    for line in result["missed"]:
        print(f"  missed: {line}")


def main(args: list[str]) -> int:
    """Measure and print."""
    goals = f"memory {RATIO_MAX}, growth {GROWTH_MAX}, time {TIME_MAX}."
    parser = command_line("train_memory", f"{__doc__}{goals}")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="growth is measured with the last one")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_check_option(parser)
    options = parser.parse_args(args)
    return show_and_check(measured(measure, options), options, print_table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
