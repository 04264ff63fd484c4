"""Whoever leads this actor, in its present life: the one place that finds a successor.

    Down, or an ask that failed ─▶ find ─▶ connect to the endpoint ─▶ the peer that listens there now ─▶ new address

A process that is started again listens where it listened before, under the name it had before, and hosts actors of the
same names; only its incarnation is new. So who is to be found again is known by endpoint, peer name and actor name.

Invariants
- An address is still one life: nothing that was meant for an older life reaches a younger one unasked. Whoever holds a
  leader decides when to look for its successor, and introduces itself to it before it says anything else.
- Looking is idempotent and cheap while the link lives: then it is the same address.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.address import ActorAddress

if TYPE_CHECKING:
    from actors.core.context import Context


class Leader:
    """A leader is the actor at ``address`` and its later lives, as one actor sees them."""

    def __init__(self, ctx: Context, address: ActorAddress) -> None:
        self._ctx = ctx
        self._first = address
        self.address = address
        """Address of its newest known life."""

    async def find(self) -> ActorAddress:
        """Look who is there now; ``address`` is that from now on.

        Raises:
            NotSent: nobody answers at its endpoint within ``limits.connect_timeout_s``, or somebody of another name.
        """
        self.address = await self._ctx.successor(self.address)
        return self.address

    def beside(self, address: ActorAddress) -> ActorAddress:
        """``address``, which was known at the same time as the leader's first life, if they share a process: now."""
        if address.peer != self._first.peer:
            return address
        return ActorAddress(address.name, self.address.peer, address.endpoint)
