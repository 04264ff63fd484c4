"""Where the processes are that the model server asks: training services and samplers, which may be started again.

follow ─▶ the head is watched, and after its death its next life is: what it is told does not get lost for good
find ─▶ known? ─no─▶ FindProcess ─▶ head: waits until that process is ready ─▶ ProcessFound ─▶ kept until ``forget``
                          └── the head is away ─▶ its next life is looked for, for ``limits.orphan_grace_s``
"""

from __future__ import annotations

import contextlib

from actors.core.context import Context
from actors.core.errors import AskError
from actors.core.leader import Leader
from actors.core.patience import Patience, ask_patiently
from actors.core.watch import Down
from actors.protocol.serving import FindProcess, ProcessFound
from transport.address import ActorAddress


class Places:
    """Knows addresses by the names of processes. ``head``: the head's actor that answers FindProcess."""

    def __init__(self, ctx: Context, head: ActorAddress) -> None:
        self._ctx, self._head = ctx, Leader(ctx, head)
        self._known: dict[str, ActorAddress] = {}

    async def find(self, name: str) -> ActorAddress:
        """The address of a process that is ready, as far as is known.

        Raises:
            AskError: the head does not say it in time, or there is no such process any more.
        """
        if name not in self._known:
            found = await ask_patiently(
                self._ctx, lambda: self._head.address, FindProcess(name=name), ProcessFound,
                renew=self._head.find, patience_s=self._ctx.limits.orphan_grace_s,
            )  # fmt: skip
            self._known[name] = found.address
        return self._known[name]

    def follow(self) -> None:
        """Watch the head. The actor passes each Down on to ``heard``."""
        self._ctx.watch(self._head.address)

    def heard(self, message: Down) -> None:
        """Look for the next life of a head that is gone, and forget where whoever else is gone was."""
        if message.address == self._head.address:
            self._ctx.start_task(self._find_head(), "find the head")
        for name, address in [*self._known.items()]:
            if address == message.address:
                self.forget(name, address)

    async def _find_head(self) -> None:
        patience = Patience(self._ctx.limits, self._ctx.rng("head"), self._ctx.limits.orphan_grace_s)
        while await patience.again():
            with contextlib.suppress(AskError):
                await self._head.find()
                self.follow()
                return

    def beside(self, address: ActorAddress) -> ActorAddress:
        """The present address of an actor of the head's process."""
        return self._head.beside(address)

    def forget(self, name: str, address: ActorAddress) -> None:
        """Ask the head again, since nobody is at ``address`` any more."""
        if self._known.get(name) == address:
            del self._known[name]
