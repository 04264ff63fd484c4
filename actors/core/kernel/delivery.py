"""One message on its way through an actor, who handles it there, and which one is being handled now."""

from __future__ import annotations

from contextvars import ContextVar
from typing import NamedTuple

import msgspec

from actors.core.kernel.answers import Caller
from actors.core.message import Message
from transport.address import ActorAddress
from transport.transport import Lane


class Window(NamedTuple):
    """What a stream may have under way, and how long either end waits for the other."""

    items: int
    bytes: int
    timeout_s: float


class Handler(msgspec.Struct, frozen=True, gc=False):
    """How an actor class answers one message type."""

    method: str
    concurrent: bool
    idempotent: bool
    streams: bool
    batched: bool = False
    occupies: bool = True
    """It runs in the actor's own task, so that nothing else does: neither concurrent nor a stream."""


class Delivery(msgspec.Struct, eq=False):
    """One message on its way through an actor. Two of them are never equal: each is a key of its own."""

    message: Message
    tag: str
    handler: Handler
    sender: ActorAddress | None
    caller: Caller | None = None
    """None for a tell."""
    deadline_at: float | None = None
    """Loop time after which the work is not to be begun."""
    lane: Lane = Lane.MESSAGE
    """The lane on which the answer goes."""
    window: Window | None = None
    """None: no stream was asked for."""
    trace_id: int = 0
    span_id: int = 0
    watch_id: int = 0
    """Not 0: a Down, valid only while the watch of that id is held."""
    answered: bool = False
    abandoned: bool = False
    """Whoever asked has left."""
    since: float = 0.0
    """Loop time at which the handler began."""


current: ContextVar[Delivery | None] = ContextVar("current_delivery", default=None)
"""The delivery whose handler runs; tasks that a handler starts inherit it, so a trace goes on in them."""
