"""A message that waits for one of the actor's handlers to end: it is as any other that has not been begun."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from actors.core.actor import Actor, concurrent, handles
from actors.core.errors import DeadlineExceeded, RefusalReason, Refused, SentNoReply
from actors.core.message import Done, Message, message
from actors.core.system import ActorSystem
from actors.core.watch import Down
from configs.limits import DEFAULT_LIMITS
from transport.codec import encode_body
from transport.envelope import Envelope, Kind
from transport.transport import Lane, SendOutcome

ONE_SLOT = DEFAULT_LIMITS.model_copy(update={"concurrent_handlers": 1, "stop_timeout_s": 0.2})


@message("test_handler_slots.work")
class Work(Message):
    name: str


class Busy(Actor):
    """Its handlers hold until the gate opens."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.gate = asyncio.Event()

    @handles(Work)
    @concurrent
    async def work(self, message: Work) -> None:
        self.begun.append(message.name)
        await self.gate.wait()

    @handles(Down)
    @concurrent
    async def down(self, message: Down) -> None:
        self.begun.append(f"down: {message.address.name}")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


async def a_few_turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def busy_pair(make_system: Any) -> tuple[ActorSystem, ActorSystem, Busy, asyncio.Task[Done]]:
    near, far = await make_system("near"), await make_system("far", limits=ONE_SLOT)
    busy = Busy()
    await far.spawn("busy", busy)
    first = asyncio.create_task(near.ref(far.address("busy")).ask(Work(name="first"), Done))
    await until(lambda: busy.begun == ["first"])
    return near, far, busy, first


async def test_a_question_that_waits_for_a_handler_to_end_can_be_taken_back(make_system: Any) -> None:
    near, far, busy, first = await busy_pair(make_system)
    with pytest.raises(DeadlineExceeded):
        await near.ref(far.address("busy")).ask(Work(name="given up"), Done, timeout_s=0.02)
    await a_few_turns()
    busy.gate.set()
    await first
    await near.ref(far.address("busy")).ask(Work(name="last"), Done)
    assert busy.begun == ["first", "last"]


async def test_a_question_whose_deadline_passes_while_it_waits_for_a_handler_to_end_never_starts(
    make_system: Any,
) -> None:
    """Whoever asked may be gone as well, so nobody need have taken the question back."""
    near, far, busy, first = await busy_pair(make_system)
    late = Envelope(kind=Kind.ASK, target="busy", request_id=77, tag="test_handler_slots.work")
    deadline_at = asyncio.get_running_loop().time() + 0.02
    outcome = near._router.links.send(
        far.peer, far.endpoint, Lane.MESSAGE, late, encode_body(Work(name="too late")), deadline_at=deadline_at
    )
    assert outcome is SendOutcome.QUEUED
    await a_few_turns()
    await asyncio.sleep(0.05)
    busy.gate.set()
    await first
    await near.ref(far.address("busy")).ask(Work(name="last"), Done)
    assert busy.begun == ["first", "last"]
    assert far.counters()["expired_before_start"] == 1


async def test_a_question_that_waits_for_a_handler_to_end_is_refused_when_the_actor_is_killed(make_system: Any) -> None:
    near, far, busy, first = await busy_pair(make_system)
    waiting = asyncio.create_task(near.ref(far.address("busy")).ask(Work(name="not begun"), Done, timeout_s=60))
    await a_few_turns()
    far._router.cells["busy"].task.cancel()
    with pytest.raises(Refused) as refused:
        async with asyncio.timeout(5):
            await waiting
    assert refused.value.reason is RefusalReason.STOPPING
    with pytest.raises(SentNoReply):
        await first
    assert busy.begun == ["first"]


async def test_a_down_that_waits_for_a_handler_to_end_is_heard(make_system: Any) -> None:
    _, far, busy, first = await busy_pair(make_system)
    await far.spawn("watched", Actor())
    busy.ctx.watch(far.address("watched"))
    await far.stop_actor("watched")
    await a_few_turns()
    busy.gate.set()
    await first
    await until(lambda: len(busy.begun) > 1)
    assert busy.begun == ["first", "down: watched"]


async def test_messages_that_wait_for_a_handler_to_end_keep_their_order_and_count_against_the_bound(
    make_system: Any,
) -> None:
    near, far, busy, first = await busy_pair(make_system)
    ref = near.ref(far.address("busy"))
    asked = [asyncio.create_task(ref.ask(Work(name=str(n)), Done)) for n in range(5)]
    await a_few_turns()
    assert len(far._router.cells["busy"].mailbox) == 5
    busy.gate.set()
    await asyncio.gather(first, *asked)
    assert busy.begun == ["first", *"01234"]
