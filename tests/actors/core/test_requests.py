"""The table of open questions: one timer for all deadlines, and what it keeps of those that ended."""

from __future__ import annotations

import asyncio

import pytest

from actors.core.errors import DeadlineExceeded
from actors.core.kernel.requests import Requests, Waiter
from actors.core.message import Done
from transport.address import ActorAddress, PeerId

TARGET = ActorAddress("a", PeerId("p", 1))


def asked(requests: Requests, number: int, deadline_at: float) -> Waiter:
    loop = asyncio.get_running_loop()
    waiter = Waiter(number, "", TARGET, "test.question", Done, loop.time())
    waiter.future = loop.create_future()
    requests.open(waiter)
    requests.arm(waiter, deadline_at)
    return waiter


async def test_questions_answered_in_time_leave_a_bounded_trace_and_the_others_still_end_in_order() -> None:
    requests = Requests(10_000)
    now = asyncio.get_running_loop().time()
    late = [asked(requests, 1, now + 0.04), asked(requests, 2, now + 0.02), asked(requests, 3, now + 60.0)]
    for number in range(10, 5010):
        asked(requests, number, now + 30.0)
        assert requests.take(number) is not None
        assert len(requests._deadlines) <= 2 * 4 + 65
    for waiter in (late[1], late[0]):
        assert waiter.future is not None
        with pytest.raises(DeadlineExceeded):
            async with asyncio.timeout(5):
                await waiter.future
    assert [waiter.request_id for waiter in requests] == [3]
    requests.fail_all("the end", "stopped")
    assert len(requests) == 0
    assert late[2].future is not None
    assert late[2].future.exception() is not None
    asked(requests, 4, now + 70.0)
    assert requests._timer is not None and not requests._timer.cancelled(), "who asks after the end is not left to wait"
