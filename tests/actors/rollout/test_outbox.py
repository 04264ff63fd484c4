"""The outbox keeps order and bounds, whatever the link says."""

from __future__ import annotations

from typing import Any, cast

from actors.core.message import Message
from actors.core.ref import ActorRef
from actors.rollout.outbox import Outbox
from actors.scheduler.messages import Leaving
from transport.transport import SendOutcome


class Link:
    """A ref that answers as told."""

    def __init__(self) -> None:
        self.outcome = SendOutcome.QUEUED
        self.sent: list[str] = []

    def tell(self, message: Message) -> SendOutcome:
        if self.outcome is SendOutcome.QUEUED:
            self.sent.append(cast(Leaving, message).reason)
        return self.outcome


def note(text: Any) -> Leaving:
    return Leaving(job="j", worker="w", reason=str(text))


def test_what_the_link_refuses_waits_and_leaves_first() -> None:
    link = Link()
    outbox = Outbox(cast(ActorRef, link), bound=8)
    outbox.send(note(0))
    for refusal in (SendOutcome.FULL, SendOutcome.NO_LINK):
        link.outcome = refusal
        outbox.send(note(1 + len(outbox)))
    assert (link.sent, len(outbox)) == (["0"], 2)
    link.outcome = SendOutcome.QUEUED
    outbox.send(note(3))
    assert (link.sent, len(outbox)) == (["0", "1", "2", "3"], 0)


def test_held_back_nothing_leaves_and_the_bound_is_told() -> None:
    link = Link()
    outbox = Outbox(cast(ActorRef, link), bound=2)
    outbox.held_back = True
    outbox.send(note(0))
    assert not outbox.full
    outbox.send(note(1))
    assert outbox.full
    assert link.sent == []
    outbox.held_back = False
    outbox.flush()
    assert link.sent == ["0", "1"]
    assert not outbox.full
