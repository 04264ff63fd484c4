"""Idempotent questions, repeated with growing pauses while the other side restarts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from actors.core.context import Context
from actors.core.errors import DeadlineExceeded, NotSent, Refused, SentNoReply
from actors.core.message import Message
from transport.address import ActorAddress

R = TypeVar("R", bound=Message)

RETRYABLE = (NotSent, SentNoReply, Refused, DeadlineExceeded)
"""What a restart of the other side looks like from here. Everything else is somebody's bug and is raised at once."""


async def ask_patiently(
    ctx: Context,
    address: Callable[[], ActorAddress],
    message: Message,
    reply: type[R],
    *,
    renew: Callable[[], Awaitable[object]] | None = None,
    timeout_s: float | None = None,
    patience_s: float | None = None,
) -> R:
    """Ask until answered, at most ``patience_s`` (default ``limits.trainer_patience_s``), then raise the last failure.

    ``address`` is called before each attempt: whoever restarted may live elsewhere. ``renew`` is awaited before each
    repeat, and may fail like an attempt: it looks where that is. ``message`` must be idempotent.
    """
    limits = ctx.limits
    give_up_at = ctx.now() + (limits.trainer_patience_s if patience_s is None else patience_s)
    pause_s, repeated = limits.backoff_first_s, False
    while True:
        try:
            if repeated and renew is not None:
                await renew()
            return await ctx.ref(address()).ask(message, reply, timeout_s)
        except RETRYABLE as error:
            if ctx.now() + pause_s > give_up_at:
                raise
            ctx.log.info("question repeated", question=type(message).__name__, after=str(error), pause_s=pause_s)
        await ctx.sleep(pause_s)
        repeated = True
        pause_s = min(2 * pause_s, limits.backoff_max_s)
