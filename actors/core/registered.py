"""An actor that offers itself to a hub, and offers itself again to each of the hub's next lives.

    on_start ─ keep_registered(hub, offer) ─▶ ask ─▶ watch ──Down──▶ find its next life, ask again, with backoff
                                               └── no answer ──────▶      │
                                                                          └─ for orphan_grace_s ─▶ stop

A hub that is restarted keeps its name and place and forgets who had registered, also if its whole process was
restarted (``leader.py``): without this a service would be alive and never be found.
"""

from __future__ import annotations

from actors.core.actor import Actor, handles
from actors.core.errors import AskError
from actors.core.leader import Leader
from actors.core.message import Message
from actors.core.watch import Down
from transport.address import ActorAddress


class RegisteredActor(Actor):
    """Base of services. Call ``keep_registered`` once, when ready to serve."""

    hub: Leader
    _offer: Message
    _answer: type[Message]

    async def keep_registered(self, hub: ActorAddress, offer: Message, answer: type[Message]) -> None:
        """Offer ourselves to ``hub`` until it answers; ``offer`` is repeated, so it must be idempotent.

        Raises:
            AskError: the hub has not answered for ``limits.orphan_grace_s``: the last failure.
        """
        self.hub, self._offer, self._answer = Leader(self.ctx, hub), offer, answer
        try:
            await self._register()
        except AskError as error:
            self.ctx.log.warning("the hub does not answer; trying again", error=str(error))
            await self._register_patiently()

    async def registered(self) -> None:
        """Called after every registration; override to say what the hub has to know."""

    async def _register(self) -> None:
        hub = self.hub.address
        await self.ctx.ref(hub).ask(self._offer, self._answer)
        self.ctx.watch(hub)
        await self.registered()

    @handles(Down)
    async def hub_down(self, message: Down) -> None:
        if message.address == self.hub.address:
            self.ctx.start_task(self._register_again(), "register again")

    async def _register_again(self) -> None:
        try:
            await self._register_patiently()
        except AskError as error:
            self.ctx.log.error("the hub stays away; stopping", error=str(error))
            self.ctx.stop("orphaned")

    async def _register_patiently(self) -> None:
        """Find the hub's next life and offer ourselves, with backoff.

        Raises:
            AskError: the last failure, after ``orphan_grace_s`` without an answer.
        """
        limits, delay_s = self.ctx.limits, self.ctx.limits.backoff_first_s
        give_up_at = self.ctx.now() + limits.orphan_grace_s
        while True:
            await self.ctx.sleep(delay_s)
            try:
                await self.hub.find()
                return await self._register()
            except AskError as error:
                if self.ctx.now() > give_up_at:
                    raise
                self.ctx.log.warning("the hub does not answer; trying again", error=str(error))
                delay_s = min(2 * delay_s, limits.backoff_max_s)
