"""Death watch: one Down for each watch, however the target ends, also if it is already gone.

    watcher ──ctx.watch(address)──▶ its system ──WATCH──▶ target's system ──DOWN──▶ watcher's mailbox

Invariants
- A watch ends with exactly one Down, or with ``unwatch`` and none.
- A watch goes one way, as Erlang's monitors do: the watcher is told, and decides. There are no Erlang links, by which
  one actor's crash ends another; actors that must end together have one parent (``ctx.spawn``, supervisors).
- The Down of an actor on a living peer travels on the message lane, behind everything that the actor said there,
  and takes its turn in the watcher's mailbox.
- The Down of a lost link comes after all that the link delivered.
- A Down is never refused: the number of watches bounds how many there can be.
"""

from __future__ import annotations

import enum

import msgspec

from actors.core.message import Message, message
from actors.core.reason import is_permanent
from transport.address import ActorAddress
from transport.transport import DownReason


class Gone(enum.StrEnum):
    """An actor can be gone in these ways. Unreachable is not dead: that alone lets nobody take over its work."""

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
    """Whether it crashed with an error that its next life would meet again."""


def gone_by_link(reason: DownReason) -> Gone:
    """What a lost link says about the actors behind it."""
    return Gone.STOPPED if reason is DownReason.STOPPED else Gone.UNREACHABLE


class ActorExit(msgspec.Struct, frozen=True):
    """How an actor ended. ``reason`` is ``crashed``, ``stopped``, ``killed``, or what ``ctx.stop`` was given."""

    reason: str
    error: BaseException | None = None

    @property
    def gone(self) -> Gone:
        """What a watcher is told of this."""
        return Gone.CRASHED if self.error is not None else Gone.STOPPED

    @property
    def permanent(self) -> bool:
        """Whether its next life would meet the same error."""
        return is_permanent(self.error)

    @property
    def detail(self) -> str:
        """The reason, or what the actor crashed with."""
        return self.reason if self.error is None else f"{type(self.error).__name__}: {self.error}"
