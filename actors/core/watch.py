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
from actors.core.reason import is_permanent
from transport.address import ActorAddress
from transport.transport import DownReason


class Gone(enum.StrEnum):
    """An actor can be gone in four ways. Unreachable is not dead."""

    STOPPED = "stopped"
    CRASHED = "crashed"
    UNREACHABLE = "unreachable"
    UNKNOWN_ACTOR = "unknown_actor"


@message("core.down")
class Down(Message):
    """A watched actor is gone. ``detail`` is its stop reason, or the text of its error."""

    address: ActorAddress
    reason: Gone
    detail: str = ""
    permanent: bool = False
    """True if it crashed with an error that its next life can only meet again."""


def gone_by_link(reason: DownReason) -> Gone:
    """What a lost link says about the actors behind it."""
    return Gone.STOPPED if reason is DownReason.STOPPED else Gone.UNREACHABLE


class ActorExit(msgspec.Struct, frozen=True):
    """An exit says how an actor ended. ``reason`` is ``crashed``, ``stopped``, ``killed``, or given to ``ctx.stop``."""

    reason: str
    error: BaseException | None = None

    @property
    def gone(self) -> Gone:
        """The same for those who watch."""
        return Gone.CRASHED if self.error is not None else Gone.STOPPED

    @property
    def permanent(self) -> bool:
        """Whether its next life could only meet the same error."""
        return is_permanent(self.error)

    @property
    def detail(self) -> str:
        """The reason, or what the actor crashed with."""
        return self.reason if self.error is None else f"{type(self.error).__name__}: {self.error}"
