"""What strangers' programs cost on one server (``headrace serve``), and what becomes of them when everything fails.

    tenants    two adapters on one base and a whole model: each by itself on a server of its own, then all three on one
                   fair   when each would end if cores were shared evenly, a thread for each; slowdown = together / fair
                   cpu    processor seconds of the server, all three together / the sum of the three alone
    overhead   forward_backward through the client and the server / the bare learner and torch backend in this process
    idle       memory of the server after so many tenants have each trained a step of an adapter, and rest; and how soon
               one of them is back

    --faults   one program, all of its requests in flight: answers dropped (20 %), turned into 500 (10 %), the server's
               processes killed with SIGKILL in turn; beside the same program undisturbed. Exit code 1 if a bit differs

The client is the unmodified ``tinker``; models are random, made on the spot, and train in float32 on one thread each.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks._command import Result, add_check_option, command_line, measured, show, show_and_check
from benchmarks._jobs import hardware, use_cores
from benchmarks.serving._costs import CONTEXT_TOKENS, VOCABULARY, WORK, idle, overhead, say, tenants
from benchmarks.serving._survival import asked_operations, struck, undisturbed

LARGE: Final = (512, 8, 8)
"""18 million parameters: a call takes some tenths of a second, beside which what the server adds can be measured."""
SMALL: Final = (64, 2, 4)
"""Width, layers and heads of a model."""
FAULT_WORK: Final = dataclasses.replace(WORK, calls=1, datums=2 * 1024 + 64, tokens=4)
"""The client cuts each call in three, which arrive out of order."""
GOAL_SLOWDOWN, GOAL_OVERHEAD, GOAL_IDLE_BYTES = 1.2, 1.05, 50_000_000


def make_base(directory: Path, size: tuple[int, int, int]) -> Path:
    """A random Hugging Face model of that size."""
    from tests.tiny_checkpoint import make_tiny_checkpoint

    hidden, layers, heads = size
    return make_tiny_checkpoint(
        directory, vocab=VOCABULARY, max_position=CONTEXT_TOKENS, hidden=hidden, layers=layers, heads=heads
    )


# ------------------------------------------------------------ the command


def missed(result: Result) -> list[str]:
    """Goals that were not met, in sentences."""
    found = [
        f"{name} differs from the same program alone"
        for name, row in result["together"]["tenants"].items() if not row["same_bits"]
    ]  # fmt: skip
    for what, ours, goal in (
        ("slowdown_max", result["together"]["slowdown_max"], GOAL_SLOWDOWN),
        ("overhead.wall", result["overhead"]["wall"]["ratio"], GOAL_OVERHEAD),
        ("overhead.cpu", result["overhead"]["cpu"]["ratio"], GOAL_OVERHEAD),
        ("idle.bytes", result["idle"]["bytes"], GOAL_IDLE_BYTES),
    ):
        if ours > goal:
            found.append(f"{what}: {ours}, the goal is {goal}")
    return found


def measure(options: argparse.Namespace, directory: Path) -> Result:
    """All three parts, each on servers of its own."""
    cores = len(use_cores(options.cores))
    result: Result = {"benchmark": "serve", "hardware": hardware()}
    large = make_base(directory / "large", SMALL if options.small else LARGE)
    small = make_base(directory / "small", SMALL)
    for part in ("alone", "overhead", "idle"):
        (directory / part).mkdir()
    result |= {
        "together": tenants(large, directory / "alone", cores),
        "overhead": overhead(large, directory / "overhead" / "served", options.calls),
        "idle": idle(small, directory / "idle" / "served", options.idle),
    }
    return result | {"missed": missed(result)}


def measure_faults(options: argparse.Namespace, directory: Path) -> Result:
    """The program undisturbed, and struck."""
    use_cores(options.cores)
    result: Result = {"benchmark": "serve --faults", "hardware": hardware()}
    model = make_base(directory / "model", SMALL)
    work = dataclasses.replace(FAULT_WORK, steps=options.steps)
    say("undisturbed")
    calm = undisturbed(model, directory / "undisturbed", work)
    say(f"struck: {options.kills} kills")
    hard = struck(model, directory / "struck", work, options.kills, options.seed)
    asked = asked_operations(work)
    equal = (calm.losses, calm.weights) == (hard.losses, hard.weights) and calm.executed == hard.executed == asked
    return result | {
        "equal": equal, "asked": asked, "undisturbed": dataclasses.asdict(calm), "struck": dataclasses.asdict(hard)
    }  # fmt: skip


def parse(args: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line("serve", __doc__)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--calls", type=int, default=20, help="calls whose overhead is measured")
    parser.add_argument("--idle", type=int, default=300, help="idle tenants")
    parser.add_argument("--small", action="store_true", help="a tiny model in all parts: only bits can be compared")
    parser.add_argument("--faults", action="store_true", help="strike one program instead, and compare bits")
    parser.add_argument("--steps", type=int, default=20, help="of the program that is struck")
    parser.add_argument("--kills", type=int, default=10, help="with SIGKILL, each at a drawn number of operations")
    parser.add_argument("--seed", type=int, default=0, help="which answers are lost, and when it is killed")
    add_check_option(parser)
    return parser.parse_args(args)


def main(args: list[str]) -> int:
    """Measure and print. With ``--faults`` the exit code says whether all is equal."""
    options = parse(args)
    if not options.faults:
        return show_and_check(measured(measure, options), options, _print_table)
    result = measured(measure_faults, options)
    show(result, options, _print_faults)
    return 0 if result["equal"] else 1


def _print_table(result: Result) -> None:
    together, overhead_, idle_ = result["together"], result["overhead"], result["idle"]
    print(f"{len(together['tenants'])} tenants on {together['cores']} cores; {result['hardware']['class']}")
    for name, row in together["tenants"].items():
        same = "the same bits" if row["same_bits"] else "OTHER BITS"
        print(
            f"  {name:<8} alone {row['alone_s']:>6} s  together {row['together_s']:>6} s  fair {row['fair_s']:>6} s"
            f"  slowdown {row['slowdown']:.2f}  {same}"
        )
    for what, unit, row in (
        ("server's processor, together / alone", "s", together["cpu"]),
        ("forward_backward, wall, served / bare", "ms", overhead_["wall"]),
        ("forward_backward, processor", "ms", overhead_["cpu"]),
    ):
        print(f"  {what:<38} {row[f'ours_{unit}']:>8} {unit:<2} {row[f'limit_{unit}']:>8} {unit:<2} {row['ratio']:.3f}")
    print(f"  {idle_['tenants']} idle tenants: {idle_['mib']} MiB; one is back within {idle_['woken_s']} s")


def _print_faults(result: Result) -> None:
    print(f"{result['asked']} operations; {result['hardware']['class']}")
    for way in ("undisturbed", "struck"):
        row = result[way]
        print(
            f"  {way:<12} executed {row['executed']:>4}  losses {row['losses']}  weights {row['weights']}"
            f"  {row['seconds']:>6} s  {row['faults'] or ''}"
        )
    print("  equal, bit for bit" if result["equal"] else "  NOT equal")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
