"""Runs a coroutine in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from transport.sim.loop import SimulatedLoop

T = TypeVar("T")


def run_simulated(main: Coroutine[Any, Any, T], *, seed: int = 0, shuffle: bool = True) -> T:
    """Run ``main`` to its end in virtual time.

    Raises:
        SimulationDeadlock: nothing could ever happen again.
    """
    with asyncio.Runner(loop_factory=lambda: SimulatedLoop(seed, shuffle=shuffle)) as runner:
        return runner.run(main)
