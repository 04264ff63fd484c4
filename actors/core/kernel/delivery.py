"""A message on its way through an actor, its handler there, and the delivery that is being handled now."""

from __future__ import annotations

from contextvars import ContextVar
from typing import NamedTuple

import msgspec

from actors.core.kernel.answers import Caller
from actors.core.message import Message
from transport.address import ActorAddress
from transport.transport import Lane


class StreamWindow(NamedTuple):
    """Bounds what a stream may have under way, and how long either end waits for the other."""

    items: int
    bytes: int
    timeout_s: float


class Handler(msgspec.Struct, frozen=True, gc=False):
    """Describes the method of an actor class that handles one message type."""

    method: str
    concurrent: bool
    streams: bool
    batched: bool = False
    occupies: bool = True
    """Whether it runs in the actor's own task, so that nothing else does: it is neither concurrent nor a stream."""


class Delivery(msgspec.Struct, eq=False):
    """One message on its way through an actor. Two are never equal: each is a key of its own."""

    message: Message
    tag: str
    handler: Handler
    sender: ActorAddress | None
    caller: Caller | None = None
    """Asker, who gets the answer; None for a tell."""
    deadline_at: float | None = None
    """Loop time after which the work is not to be begun."""
    lane: Lane = Lane.MESSAGE
    """The lane on which the answer goes."""
    window: StreamWindow | None = None
    """Window of the stream that was asked for, if any."""
    watch_id: int = 0
    """Id of the watch that a Down ends; 0 for every other message. A Down whose watch is over is dropped."""
    answered: bool = False
    abandoned: bool = False
    """Whether the asker has left."""
    since: float = 0.0
    """Loop time at which the handler began."""


current: ContextVar[Delivery | None] = ContextVar("current_delivery", default=None)
"""The delivery whose handler runs; tasks that a handler starts inherit it."""
