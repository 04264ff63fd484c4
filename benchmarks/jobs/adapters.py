"""Samples of many adapters of one model from one engine: side by side, by turns, and as if all were of one.

    requests, as many of each adapter, all at once ─▶ SnapshotSampler ─▶ torch engine ─┬─ side   adapters are held
                                                                                       ├─ turns  loaded one by one
    as many requests, all of one adapter ──────────────────────────────────────────────┴─ one    loaded: the limit

``ratio`` is tokens a second side by side over those of one adapter, which is merged into the weights and costs nothing.
``gain`` is side by side over turns. Rounds alternate, and each figure is a median. ``missed``: with the sizes that are
the default, side by side is slower than turns.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from time import perf_counter
from typing import Final

import numpy as np

from actors.protocol.sampling import SampleRequest
from actors.rollout.engine import EngineSpec
from actors.rollout.engines.torch.torch_engine import TorchEngine
from actors.sampling.sampler import SamplerSetup, SnapshotSampler
from benchmarks._command import Result, add_check_option, command_line, measured, show_and_check
from benchmarks._jobs import hardware

RANKS: Final = (8, 16, 32)
WAYS: Final = ("side", "turns", "one")
PROMPT_TOKENS: Final = 32


class TurnsEngine(TorchEngine):
    """Holds no adapters, so that snapshots take turns."""

    @property
    def holds_adapters(self) -> bool:
        return False


def measure(options: argparse.Namespace, scratch: Path) -> Result:
    """Make a model and its adapters, then measure each way in each round."""
    from tests.made_snapshots import write_adapter
    from tests.tiny_checkpoint import make_tiny_checkpoint

    result: Result = {"benchmark": "adapters", "hardware": hardware(), "device": options.device}
    base = make_tiny_checkpoint(
        scratch / "model", vocab=options.vocabulary, hidden=options.hidden, layers=options.layers, heads=8, kv_heads=4
    )
    ranks = [RANKS[number % len(RANKS)] for number in range(options.adapters)]
    snapshots = [
        write_adapter(scratch / f"adapter {number}", base, rank=rank, seed=number, spread=0.02)
        for number, rank in enumerate(ranks)
    ]
    found = asyncio.run(_all_rounds(options, base, snapshots))
    result |= {"adapters": options.adapters, "ranks": ranks, "sequences": options.adapters * options.each}
    result |= {"tokens": options.tokens, "hidden": options.hidden, "layers": options.layers}
    return result | compared(found)


async def _all_rounds(options: argparse.Namespace, base: Path, snapshots: list[Path]) -> dict[str, list[float]]:
    """Tokens a second of each way, a round each."""
    spec = EngineSpec(
        model_path=base, device=options.device, threads=options.cores, max_running=len(snapshots) * options.each,
        max_context_tokens=PROMPT_TOKENS + options.tokens,
    )  # fmt: skip
    setup = SamplerSetup(engine="torch", spec=spec, end_tokens=())
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    async with AsyncExitStack() as closing:
        samplers: dict[str, SnapshotSampler] = {}
        for way in WAYS:
            samplers[way] = SnapshotSampler(setup, make=TorchEngine if way == "side" else TurnsEngine)
            closing.push_async_callback(samplers[way].close)
            await samplers[way].start()
        running = [asyncio.create_task(sampler.run(), name=way) for way, sampler in samplers.items()]
        for number in range(1 + options.rounds):
            for way, sampler in samplers.items():
                asked = snapshots if way != "one" else snapshots[:1] * len(snapshots)
                tokens_per_s = await _one_round(sampler, asked, options)
                print(f"{way:<6} {tokens_per_s:8.0f} tokens/s", file=sys.stderr, flush=True)
                found[way] += [tokens_per_s] if number else []  # the first round reads adapters, and grows caches
    await asyncio.gather(*running, return_exceptions=True)
    return found


async def _one_round(sampler: SnapshotSampler, snapshots: Sequence[Path], options: argparse.Namespace) -> float:
    tokens = np.arange(PROMPT_TOKENS, dtype=np.int32)
    requests = [
        SampleRequest(
            prompt=3 + (7 * tokens + 13 * number) % (options.vocabulary - 3),
            snapshot=str(snapshot),
            seed=number,
            stop=(),
            max_tokens=options.tokens,
        )
        for number, snapshot in enumerate([*snapshots] * options.each)
    ]
    began_s = perf_counter()
    results = await asyncio.gather(*(sampler.sample(request) for request in requests))
    return sum(len(one.tokens) for result in results for one in result.sequences) / (perf_counter() - began_s)


def compared(found: dict[str, list[float]]) -> Result:
    """Medians, and side by side against the other ways."""
    side, turns, one = (statistics.median(found[way]) for way in WAYS)
    missed = [] if side >= turns else [f"side by side {side:.0f} tokens/s, by turns {turns:.0f}"]
    return {
        "ours": round(side), "limit": round(one), "ratio": round(side / one, 3),
        "turns": round(turns), "gain": round(side / turns, 2), "unit": "tokens/s", "missed": missed,
    }  # fmt: skip


def parse(args: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line("adapters", __doc__)
    for name, value in (("adapters", 8), ("each", 4), ("tokens", 64), ("rounds", 3), ("cores", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("hidden", 512), ("layers", 8), ("vocabulary", 4096)):
        parser.add_argument(f"--{name}", type=int, default=value, help="of the model that is made")
    parser.add_argument("--device", default="cpu")
    add_check_option(parser)
    return parser.parse_args(args)


def main(args: list[str]) -> int:
    """Measure and print; with ``--check`` hold the figures against each other."""
    options = parse(args)
    return show_and_check(measured(measure, options), options)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
