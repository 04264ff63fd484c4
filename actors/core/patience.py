"""Trying again while the other side restarts: pauses that grow, for as long as there is time.

    patience = Patience(ctx.limits, ctx.rng("patience"), ctx.limits.orphan_grace_s)
    while True:
        try:
            return await attempt()
        except AskError:
            if not await patience.again():
                raise

Invariants
- The first pause is ``limits.backoff_first_s``, each next one twice as long, up to ``limits.backoff_max_s``. A wait is
  a random part of the pause, at least half of it ("equal jitter"), so that those who lost the same process do not all
  return at once.
- A pause never goes beyond the end of the patience; one last attempt is made then.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from actors.core.context import Context
from actors.core.errors import DeadlineExceeded, NotSent, Refused, SentNoReply
from actors.core.message import Message
from configs.limits import Limits
from transport.address import ActorAddress

R = TypeVar("R", bound=Message)

RETRYABLE = (NotSent, SentNoReply, Refused, DeadlineExceeded)
"""Failures that a restart of the other side may cause. All others are bugs, and are raised at once."""


class Patience:
    """Makes the pauses between the attempts at one thing: without end, if no ``patience_s`` is given."""

    def __init__(self, limits: Limits, rng: random.Random, patience_s: float = math.inf) -> None:
        self._first_s, self._max_s = limits.backoff_first_s, limits.backoff_max_s
        self._rng = rng
        self._over_at = asyncio.get_running_loop().time() + patience_s
        self.begin_anew()

    def begin_anew(self) -> None:
        """Make the next pause the shortest again, because an attempt has worked."""
        self._pause_s = self._first_s

    @property
    def left_s(self) -> float:
        """Seconds in which another attempt may still be made."""
        return max(0.0, self._over_at - asyncio.get_running_loop().time())

    def pause_s(self) -> float:
        """Seconds to wait before the next attempt, for callers that wait for something else meanwhile."""
        pause_s = min(self._pause_s * self._rng.uniform(0.5, 1.0), self.left_s)
        self._pause_s = min(2 * self._pause_s, self._max_s)
        return pause_s

    async def again(self) -> bool:
        """Wait before the next attempt; False, without waiting, if there is no time for one."""
        if self.left_s <= 0:
            return False
        await asyncio.sleep(self.pause_s())
        return True


async def is_still_there(ctx: Context, address: ActorAddress, patience_s: float) -> bool:
    """Whether the same life at ``address``, to which the link broke, can be reached again within ``patience_s``."""
    patience = Patience(ctx.limits, ctx.rng("patience"), patience_s)
    while await patience.again():
        try:
            async with asyncio.timeout(max(patience.left_s, ctx.limits.backoff_first_s)):
                return await ctx.successor(address) == address
        except (TimeoutError, NotSent):
            continue
    return False


async def ask_patiently(
    ctx: Context,
    address: Callable[[], ActorAddress],
    message: Message,
    reply: type[R],
    *,
    renew: Callable[[], Awaitable[object]],
    patience_s: float | None = None,
) -> R:
    """Ask until answered, at most ``patience_s`` (default ``limits.trainer_patience_s``), then raise the last failure.

    ``address`` is called before each attempt, since the actor may have restarted elsewhere. ``renew`` is awaited before
    each repeat to find it again, and may fail like an attempt. ``message`` must be idempotent.
    """
    limits, repeated = ctx.limits, False
    patience = Patience(limits, ctx.rng("patience"), limits.trainer_patience_s if patience_s is None else patience_s)
    while True:
        try:
            if repeated:
                await renew()
            return await ctx.ref(address()).ask(message, reply)
        except RETRYABLE as error:
            ctx.log.info("question repeated", question=type(message).__name__, after=str(error))
            if not await patience.again():
                raise
        repeated = True
