"""Virtual time: it jumps, it repeats itself for equal seeds, and it reports when nothing can ever happen again."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.simulated import run_simulated
from transport.sim.loop import SimulatedLoop, SimulationDeadlock, SimulationError


def test_a_year_passes_in_a_moment() -> None:
    async def main() -> float:
        await asyncio.sleep(365 * 86400)
        return asyncio.get_running_loop().time()

    assert run_simulated(main()) == pytest.approx(365 * 86400)


def test_time_goes_on_by_small_steps_after_many_years() -> None:
    async def main() -> int:
        await asyncio.sleep(100 * 365 * 86400)
        ticks = 0
        while ticks < 1000:
            await asyncio.sleep(0.0001)
            ticks += 1
        return ticks

    assert run_simulated(main()) == 1000


def test_a_deadline_works() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.sleep(50)
        return asyncio.get_running_loop().time()

    assert run_simulated(main()) == pytest.approx(5)


def test_when_everybody_waits_and_nothing_is_scheduled_the_report_names_who_waits_where() -> None:
    async def stuck() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.get_running_loop().create_task(stuck(), name="the stuck one")
        await task

    with pytest.raises(SimulationDeadlock, match=r"the stuck one at locks\.py:\d+ < test_sim_loop\.py"):
        run_simulated(main())


def test_threads_and_sockets_are_refused() -> None:
    async def thread() -> None:
        await asyncio.to_thread(time.sleep, 0)

    async def reader() -> None:
        asyncio.get_running_loop().add_reader(0, print)

    with pytest.raises(SimulationError, match="thread"):
        run_simulated(thread())
    with pytest.raises(NotImplementedError):
        run_simulated(reader())


def order_of_tasks(seed: int, *, shuffle: bool = True) -> list[int]:
    async def main() -> list[int]:
        order: list[int] = []

        async def note(number: int) -> None:
            await asyncio.sleep(0)
            order.append(number)

        await asyncio.gather(*[note(number) for number in range(30)])
        return order

    return run_simulated(main(), seed=seed, shuffle=shuffle)


def test_equal_seeds_run_ready_tasks_in_equal_order_and_others_do_not() -> None:
    assert order_of_tasks(1) == order_of_tasks(1)
    assert order_of_tasks(1) != order_of_tasks(2)
    assert order_of_tasks(1, shuffle=False) == list(range(30))


def test_callbacks_keep_their_order_however_tasks_are_shuffled() -> None:
    async def main() -> list[int]:
        order: list[int] = []
        tasks: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        for number in range(20):
            loop.call_soon(order.append, number)
            tasks.append(loop.create_task(asyncio.sleep(0)))
        await asyncio.sleep(1)
        return order

    assert all(run_simulated(main(), seed=seed) == list(range(20)) for seed in range(5))


def test_an_exception_of_the_program_comes_out_as_it_is() -> None:
    async def main() -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_simulated(main())


def test_the_loop_starts_at_zero() -> None:
    loop = SimulatedLoop()
    assert loop.time() == 0
    loop.close()
