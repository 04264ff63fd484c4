"""An actor's own thread: what it keeps of a call that has ended."""

from __future__ import annotations

import asyncio
import gc
import weakref

from actors.core.kernel.blocking import BlockingThread


class Large:
    """Stands for the mapping of a version of the weights."""


async def test_a_thread_that_waits_for_its_next_call_keeps_nothing_of_the_last_one() -> None:
    """Else a whole segment stays mapped until somebody happens to call again."""
    thread = BlockingThread("a", 10, 10.0)
    argument = Large()
    result = await thread.run(lambda _: Large(), argument)
    left = [weakref.ref(argument), weakref.ref(result)]
    del argument, result
    async with asyncio.timeout(5):
        while any(ref() is not None for ref in left):
            await asyncio.sleep(0)
    assert await thread.close(5)


async def test_it_keeps_nothing_of_a_call_that_has_failed_either() -> None:
    thread = BlockingThread("a", 10, 10.0)

    def fail(_: Large) -> None:
        raise ValueError("no")

    argument = Large()
    left = weakref.ref(argument)
    outcome = await asyncio.gather(thread.run(fail, argument), return_exceptions=True)
    assert isinstance(outcome[0], ValueError)
    del argument, outcome
    async with asyncio.timeout(5):
        while left() is not None:
            await asyncio.sleep(0)
            gc.collect()  # an error knows the frames that it came through, and they know it
    assert await thread.close(5)
