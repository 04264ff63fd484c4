"""One message on its way through an actor, and which one is being handled now."""

from __future__ import annotations

from contextvars import ContextVar
from typing import NamedTuple

from actors.core.actor import Handler
from actors.core.answers import Caller
from actors.core.message import Message
from transport.address import ActorAddress
from transport.transport import Lane


class Window(NamedTuple):
    """What a stream may have under way, and how long either end waits for the other."""

    items: int
    bytes: int
    timeout_s: float


class Delivery:
    """One message on its way through an actor."""

    __slots__ = (
        "abandoned", "answered", "caller", "deadline_at", "handler", "lane", "message", "sender", "since", "span_id",
        "tag", "trace_id", "watch_id", "window",
    )  # fmt: skip

    def __init__(
        self,
        message: Message,
        tag: str,
        handler: Handler,
        sender: ActorAddress | None,
        *,
        caller: Caller | None = None,
        deadline_at: float | None = None,
        lane: Lane = Lane.MESSAGE,
        window: Window | None = None,
        trace_id: int = 0,
        span_id: int = 0,
        watch_id: int = 0,
    ) -> None:
        self.message = message
        self.tag = tag
        self.handler = handler
        self.sender = sender
        self.caller = caller
        """None for a tell."""
        self.deadline_at = deadline_at
        """Loop time after which the work is not to be begun."""
        self.lane = lane
        """The lane on which the answer goes."""
        self.window = window
        """None: no stream was asked for."""
        self.trace_id = trace_id
        self.span_id = span_id
        self.watch_id = watch_id
        """Not 0: a Down, valid only while the watch of that id is held."""
        self.answered = False
        self.abandoned = False
        """Whoever asked has left."""
        self.since = 0.0
        """Loop time at which the handler began."""


current: ContextVar[Delivery | None] = ContextVar("current_delivery", default=None)
"""The delivery whose handler runs; tasks that a handler starts inherit it, so a trace goes on in them."""
