"""What another process sends is judged by its header, whatever the sender believes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.core.actor import Actor, handles
from actors.core.errors import WrongReply
from actors.core.message import Done, Message, message
from actors.core.system import ActorSystem
from transport.codec import encode_body
from transport.envelope import Envelope, Kind
from transport.transport import Lane, SendOutcome


@message("test_inbound.note")
class Note(Message):
    text: str


class Notes(Actor):
    """Holds at the first note until the gate opens."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.gate = asyncio.Event()

    @handles(Note)
    async def note(self, message: Note) -> None:
        self.read.append(message.text)
        await self.gate.wait()


async def linked(make_system: Any) -> tuple[ActorSystem, ActorSystem, Notes]:
    near, far, notes = await make_system("near"), await make_system("far"), Notes()
    await far.spawn("notes", notes)
    near.ref(far.address("notes")).tell(Note(text="first"))
    await until(lambda: notes.read == ["first"])
    return near, far, notes


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


def send(near: ActorSystem, far: ActorSystem, envelope: Envelope, text: str, deadline_at: float | None = None) -> None:
    """A question that nobody here waits for, so that nobody takes it back."""
    body = encode_body(Note(text=text))
    links = near._router.links
    outcome = links.send(far.peer, far.endpoint, Lane.MESSAGE, envelope, body, deadline_at=deadline_at)
    assert outcome is SendOutcome.QUEUED


def question(life: int) -> Envelope:
    return Envelope(kind=Kind.ASK, target="notes", target_incarnation=life, request_id=77, tag="test_inbound.note")


async def test_a_message_that_means_an_older_life_of_this_process_is_refused_by_the_receiver(make_system: Any) -> None:
    near, far, notes = await linked(make_system)
    notes.gate.set()
    send(near, far, question(far.peer.incarnation - 1), "for somebody else")
    send(near, far, question(far.peer.incarnation), "for us")
    await until(lambda: len(notes.read) > 1)
    assert notes.read == ["first", "for us"]
    assert far.counters()["asks_refused.older_life"] == 1


async def test_work_whose_deadline_has_passed_while_it_waited_never_starts(make_system: Any) -> None:
    """Whoever asked may be gone as well, so nobody need have taken the question back."""
    near, far, notes = await linked(make_system)
    now = asyncio.get_running_loop().time()
    send(near, far, question(far.peer.incarnation), "in time", deadline_at=now + 60)
    send(near, far, question(far.peer.incarnation), "too late", deadline_at=now + 0.01)
    await until(lambda: len(far._router.cells["notes"].mailbox) == 2)
    await asyncio.sleep(0.02)
    notes.gate.set()
    await until(lambda: far.counters().get("expired_before_start", 0) + len(notes.read) == 3)
    assert notes.read == ["first", "in time"]


@pytest.mark.parametrize("kind", [Kind.ERROR, Kind.REFUSED, Kind.DOWN])
async def test_an_error_that_is_none_ends_the_question_as_a_wrong_reply(make_system: Any, kind: Kind) -> None:
    """It has left the table of open questions by then: no deadline would end it any more."""
    near, far, notes = await linked(make_system)
    asked = asyncio.ensure_future(near.ref(far.address("notes")).ask(Note(text="?"), Done, timeout_s=60))
    await until(lambda: len(near._router.requests) == 1)
    [waiter] = near._router.requests
    wrong = Envelope(kind=kind, request_id=waiter.request_id, tag="core.done")
    assert far._router.links.send(near.peer, "", Lane.MESSAGE, wrong, encode_body(Done())) is SendOutcome.QUEUED
    with pytest.raises(WrongReply, match="got Done"):
        async with asyncio.timeout(5):
            await asked
    notes.gate.set()
