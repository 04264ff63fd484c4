"""What a closed terminal, Ctrl-C and a batch system's signals do to a process that is to take its checkpoint."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from supervisors.head.head_process import interruptible


async def sent(*numbers: int) -> tuple[bool, bool]:
    """Whether the work was told to end, and whether it was cancelled."""
    told = False
    try:
        async with interruptible() as interrupted:
            for number in numbers:
                os.kill(os.getpid(), number)
                await asyncio.sleep(0.02)
            told = interrupted.is_set()
            return told, False
    except asyncio.CancelledError:
        return True, True


@pytest.fixture(autouse=True)
def hangup() -> Iterator[None]:
    """A hangup ends a process, as it does unless somebody says otherwise: nohup, under which tests may run."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_each_of_them_asks_for_the_end_once(number: int) -> None:
    assert await sent(number) == (True, False)


async def test_a_second_ctrl_c_ends_at_once_and_further_hangups_do_not() -> None:
    task = asyncio.create_task(sent(signal.SIGINT, signal.SIGINT))
    assert await task == (True, True)
    assert await sent(signal.SIGHUP, signal.SIGHUP, signal.SIGHUP) == (True, False)
    assert await sent(signal.SIGTERM, signal.SIGHUP) == (True, False)


async def test_under_nohup_a_hangup_is_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert await sent(signal.SIGHUP) == (False, False)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
