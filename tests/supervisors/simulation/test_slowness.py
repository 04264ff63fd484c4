"""A slow process takes longer for as long as it is slow, and no longer."""

from __future__ import annotations

import asyncio

import pytest

from supervisors.simulation.cluster.paced import slowly
from tests.simulated import run_simulated
from transport.sim.process import SimProcess


def seconds_for(work_s: float, *, slowness: float, slow_for_s: float) -> float:
    """How long ``work_s`` take in a process that is slow at first, for ``slow_for_s`` beyond the work itself."""

    async def scenario() -> float:
        loop, life = asyncio.get_running_loop(), SimProcess("p")
        life.slowness = slowness

        def heal() -> None:
            life.slowness = 1.0

        loop.call_later(work_s + slow_for_s, heal)
        began_s = loop.time()
        await slowly(life, asyncio.sleep(work_s))
        return loop.time() - began_s

    return run_simulated(scenario())


def test_work_in_a_slow_process_takes_so_many_times_as_long() -> None:
    assert seconds_for(2.0, slowness=5.0, slow_for_s=100.0) == pytest.approx(10.0, abs=0.3)


def test_a_step_that_was_begun_while_slow_goes_on_at_full_speed_once_that_is_over() -> None:
    # 16 times 5 s are owed, 4 of them are spent while it is slow, and what 76 s of slow work are takes 76 / 17 s then
    assert seconds_for(5.0, slowness=17.0, slow_for_s=4.0) == pytest.approx(5.0 + 4.0 + 76.0 / 17.0, abs=0.3)
