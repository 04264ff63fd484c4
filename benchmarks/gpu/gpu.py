"""What one GPU makes of engine, trainer, weights and whole jobs, each beside a peer or the card's own limit.

    model ─▶ decode    tokens/s of the torch engine              against transformers' generate, and memory bandwidth
             train     tokens/s of accumulate and step           against a plain forward, backward, AdamW
             weights   publish, pull and load a version          against copies between the card and pinned memory
             sleep     sleep and wake of the engine              against the same copies
             residency park and resume of a trainer's state      against the same copies
             memory    bytes a parameter, and a micro-batch's    against docs/guides/real_model.md
             sync, async, killed    the quickstart on the card: its reward rises, nothing is lost
             adapter, ppo, episodes    short jobs of these kinds on the card

The model is a Qwen3 of 0.6 billion random parameters in bfloat16, made on the spot. Each part is a process of its own
and says what it found as soon as it has: one that fails appears with its error, the others keep their figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks._command import Result, command_line, measured, show
from benchmarks._jobs import BenchmarkFailed, hardware, last_line

JOBS: Final = ("sync", "async", "killed", "adapter", "ppo", "episodes")
PARTS: Final = ("decode", "train", "weights", "sleep", "residency", "memory", *JOBS)
PART_TIMEOUT_S: Final = 240.0
"""Three times what the longest part takes on one H100."""


def run_part(name: str, arguments: dict[str, Any]) -> Result:
    """One part's figures; ``{"error": …}`` if it failed."""
    module = "_gpu_jobs" if name in JOBS else "_gpu_parts"
    command = [sys.executable, "-m", f"benchmarks.gpu.{module}", name, json.dumps(arguments)]
    try:
        return json.loads(last_line(command, timeout_s=PART_TIMEOUT_S))
    except (BenchmarkFailed, json.JSONDecodeError) as error:
        return {"error": str(error)}


def measure(options: argparse.Namespace, scratch: Path) -> Result:
    """All parts that were asked for, in order."""
    result: Result = {"hardware": hardware(), "card": card(options.device)}
    arguments = {
        "device": options.device,
        "small": options.small,
        "scratch": str(scratch),
        "tiny": str(options.model.resolve()) if options.model else "",
    }
    for name in options.parts.split(","):
        result[name] = run_part(name, arguments)
        print(f"{name:<8} {json.dumps(result[name])}", file=sys.stderr, flush=True)
    return result


def card(device: str) -> str:
    """The card's name; empty on the CPU."""
    import torch

    return torch.cuda.get_device_name(0) if device == "cuda" and torch.cuda.is_available() else ""


def parse(args: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line("gpu", __doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="names, with commas")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model and short jobs: whether it works at all")
    parser.add_argument("--model", type=Path, help="for the quickstart, instead of making its own")
    options = parser.parse_args(args)
    if unknown := [name for name in options.parts.split(",") if name not in PARTS]:
        parser.error(f"--parts: there is no {unknown[0]!r}; expected some of {', '.join(PARTS)}")
    return options


def main(args: list[str]) -> int:
    """Measure and print; 1 if a part failed."""
    options = parse(args)
    result = measured(measure, options)
    show(result, options, _print_table)
    return int(any("error" in result[name] for name in PARTS if name in result))


def _print_table(result: Result) -> None:
    print(result["card"] or "CPU")
    for name in PARTS:
        for key, value in result.get(name, {}).items():
            print(f"  {name:<8} {key:<34} {value}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
