"""Streams that go wrong before their first item: opened twice, or with a question that cannot be sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from actors.core.actor import Actor, concurrent, handles
from actors.core.kernel.links import MessageTooLarge
from actors.core.message import Done, Message, message
from actors.core.system import ActorSystem
from configs.limits import DEFAULT_LIMITS
from transport.codec import encode_body
from transport.envelope import Envelope, Kind
from transport.transport import Lane, SendOutcome


@message("test_stream_desk.count")
class Count(Message):
    what: Any = None


@message("test_stream_desk.number")
class Number(Message):
    number: int


@message("test_stream_desk.hello")
class Hello(Message):
    pass


class Counter(Actor):
    """Counts on until nobody listens."""

    def __init__(self) -> None:
        self.begun = 0
        self.closed = 0

    @handles(Count)
    @concurrent
    async def count(self, message: Count) -> AsyncIterator[Number]:
        self.begun += 1
        try:
            for number in range(1000):
                yield Number(number=number)
        finally:
            self.closed += 1

    @handles(Hello)
    async def hello(self, message: Hello) -> None:
        return


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


def send(near: ActorSystem, far: ActorSystem, envelope: Envelope, *body: Message) -> None:
    frames = [frame for one in body for frame in encode_body(one)]
    assert near._router.links.send(far.peer, far.endpoint, Lane.MESSAGE, envelope, frames) is SendOutcome.QUEUED


async def test_a_stream_that_is_opened_twice_goes_on_once(make_system: Any) -> None:
    """Else a peer that repeats itself would crash whom it asks, and the second generator would never be closed."""
    near, far, counter = await make_system("near"), await make_system("far"), Counter()
    ref = near.ref((await far.spawn("counter", counter)).address)
    await ref.ask(Hello(), Done)
    opening = Envelope(kind=Kind.STREAM_OPEN, target="counter", request_id=77, tag="test_stream_desk.count",
                       number=2, number_bytes=1000, deadline_ms=60_000)  # fmt: skip
    send(near, far, opening, Count())
    send(near, far, opening, Count())
    await ref.ask(Hello(), Done)
    await until(lambda: len(far._router.producers) == 1 and len(far._router.cells["counter"].working) == 1)
    send(near, far, Envelope(kind=Kind.CANCEL, target="counter", request_id=77))
    await until(lambda: len(far._router.producers) == 0 and counter.closed == counter.begun)
    assert counter.begun == 1
    await ref.ask(Hello(), Done)


@pytest.mark.parametrize(("what", "error"), [(bytes(5000), MessageTooLarge), (object(), TypeError)])
async def test_a_stream_whose_question_cannot_be_sent_leaves_no_open_question(
    make_system: Any, what: object, error: type[Exception]
) -> None:
    """Whoever opened it learns why; nobody would ever close what it never entered."""
    limits = DEFAULT_LIMITS.model_copy(update={"message_max_bytes": 4096})
    near, far = await make_system("near", limits=limits), await make_system("far")
    ref = near.ref((await far.spawn("counter", Counter())).address)
    with pytest.raises(error):
        async with ref.stream(Count(what=what), Number):
            pass
    assert len(near._router.requests) == 0
    await ref.ask(Hello(), Done)
