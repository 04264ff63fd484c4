"""Death watch: one Down for each watch, however the target goes, also if it is already gone.

    watcher ──ctx.watch(address)──▶ its system ──WATCH──▶ target's system ──DOWN──▶ watcher's mailbox

Invariants
- A watch ends with exactly one Down, or with ``unwatch`` and none.
- The Down of an actor on a living peer travels on the message lane, behind everything that the actor said there,
  and takes its turn in the watcher's mailbox: who said goodbye first is heard first.
- The Down of a lost link comes after all that the link delivered.
- A Down is never refused: watches bound how many there can be.
"""

from __future__ import annotations

import enum

import msgspec

from actors.core.message import Message, message
from transport.address import ActorAddress
from transport.transport import DownReason


class Gone(enum.StrEnum):
    """The four ways not to be there. Unreachable is not dead."""

    STOPPED = "stopped"
    CRASHED = "crashed"
    UNREACHABLE = "unreachable"
    UNKNOWN_ACTOR = "unknown_actor"


@message("core.down")
class Down(Message):
    """Says that a watched actor is gone. ``detail`` is its own word: the stop reason, or the error's text."""

    address: ActorAddress
    reason: Gone
    detail: str = ""


def gone_by_link(reason: DownReason) -> Gone:
    """What a lost link says about the actors behind it."""
    return Gone.STOPPED if reason is DownReason.STOPPED else Gone.UNREACHABLE


class ActorExit(msgspec.Struct, frozen=True):
    """How an actor ended. ``reason``: ``crashed``, ``stopped``, ``killed``, or what it gave to ``ctx.stop``."""

    reason: str
    error: BaseException | None = None

    @property
    def gone(self) -> Gone:
        """The same for those who watch."""
        return Gone.CRASHED if self.error is not None else Gone.STOPPED

    @property
    def detail(self) -> str:
        """The reason, or what the actor crashed with."""
        return self.reason if self.error is None else f"{type(self.error).__name__}: {self.error}"
