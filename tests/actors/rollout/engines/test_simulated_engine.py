"""The simulated engine's costs, on a virtual clock. What it promises as an engine: the contract suite."""

from __future__ import annotations

import asyncio
from pathlib import Path

from actors.rollout.engine import EngineSpec
from actors.rollout.engines.simulated_engine import SimulatedEngine
from transport.sim.loop import run_simulated


async def seconds_to_start(**options: float) -> float:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    spec = EngineSpec(
        model_path=Path("none"), dtype="float32", device="cpu", max_running=4, max_context_tokens=64, threads=1, seed=0,
        options=options,
    )  # fmt: skip
    await SimulatedEngine().start(spec)
    return loop.time() - began_s


def test_a_start_takes_as_long_as_the_options_say_and_no_time_by_default() -> None:
    assert run_simulated(seconds_to_start(start_s=6.0)) == 6.0
    assert run_simulated(seconds_to_start()) == 0.0
