"""Finds the present life of the actor that leads this one; nothing else looks for successors.

    Down, or an ask that failed ─▶ find ─▶ connect to the endpoint ─▶ the peer that listens there now ─▶ new address

A process that is started again listens where it listened before, under the same name, and hosts actors of the same
names; only its incarnation is new. So endpoint, peer name and actor name are enough to find an actor again.

Erlang finds a restarted process under its registered name, and callers do not notice that it is a new one. Here an
address names one life, so that a worker cannot speak to its scheduler's next life as if that knew it already.

Invariants
- An address is still one life: nothing that was meant for an older life reaches a younger one by accident. The holder
  of a ``Leader`` decides when to look for the successor, and introduces itself there before it says anything else.
- Looking is idempotent, and cheap while the link lives: the address then stays the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.address import ActorAddress

if TYPE_CHECKING:
    from actors.core.context import Context


class Leader:
    """A ``Leader`` stands for the actor at ``address`` and its later lives.

    leader = Leader(ctx, address)
    await ctx.ref(leader.address).ask(...)                    # NotSent: that life is gone
    await leader.find()                                       # connects to its endpoint; address is now the next life's
    await ctx.ref(leader.address).ask(introduction, ...)      # the new life knows nothing of us
    leader.beside(metrics)                                    # an actor of the same process, in its present life
    """

    def __init__(self, ctx: Context, address: ActorAddress) -> None:
        self._ctx = ctx
        self._first = address
        self.address = address
        """Address of its newest known life."""

    async def find(self) -> ActorAddress:
        """Find the actor's present life, and set ``address`` to it.

        Raises:
            NotSent: nobody answers at its endpoint within ``limits.connect_timeout_s``, or somebody of another name.
        """
        self.address = await self._ctx.successor(self.address)
        return self.address

    def beside(self, address: ActorAddress) -> ActorAddress:
        """The present address of an actor that stood beside the leader's first life, at ``address``."""
        if address.peer != self._first.peer:
            return address
        return ActorAddress(address.name, self.address.peer, address.endpoint)
