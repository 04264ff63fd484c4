"""Tells that wait together are handled together, in order, and never beyond a message of another kind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.core.actor import Actor, Delivery, batched, concurrent, handles
from actors.core.errors import WrongHandler
from actors.core.message import Done, Message, message


@message("test_batches.item")
class Item(Message):
    number: int = 0


@message("test_batches.pause")
class Pause(Message):
    pass


class Collector(Actor):
    def __init__(self) -> None:
        self.log: list[Any] = []
        self.gate = asyncio.Event()

    @handles(Item)
    @batched
    async def take(self, batch: list[Delivery]) -> None:
        self.log.append([delivery.message.number for delivery in batch])  # type: ignore[attr-defined]

    @handles(Pause)
    async def pause(self, _: Pause) -> None:
        self.log.append("pause")
        await self.gate.wait()


async def test_what_waits_comes_in_one_batch_up_to_the_next_message_of_another_kind(make_system: Any) -> None:
    actor, system = Collector(), await make_system("here")
    ref = await system.spawn("collector", actor)
    ref.tell(Pause())
    await asyncio.sleep(0)
    for number in range(3):
        ref.tell(Item(number=number))
    ref.tell(Pause())
    ref.tell(Item(number=3))
    question = asyncio.create_task(ref.ask(Item(number=4), Done))
    await asyncio.sleep(0)
    ref.tell(Item(number=5))
    actor.gate.set()
    await question
    await ref.ask(Pause(), Done)
    assert actor.log == ["pause", [0, 1, 2], "pause", [3], [4], [5], "pause"], "a question comes alone"


async def test_a_full_mailbox_of_batches_leaves_the_loop_to_others(make_system: Any) -> None:
    actor, system = Collector(), await make_system("here")
    ref = await system.spawn("collector", actor)
    ref.tell(Pause())
    await asyncio.sleep(0)
    for number in range(300):
        ref.tell(Item(number=number))
    actor.gate.set()
    await ref.ask(Pause(), Done)
    batches = [batch for batch in actor.log if batch != "pause"]
    assert max(map(len, batches)) <= 128
    assert [number for batch in batches for number in batch] == list(range(300))


def test_a_batch_cannot_be_handled_beside_others() -> None:
    with pytest.raises(WrongHandler, match="cannot run beside others"):

        class Wrong(Actor):
            @handles(Item)
            @batched
            @concurrent
            async def take(self, batch: list[Delivery]) -> None: ...
