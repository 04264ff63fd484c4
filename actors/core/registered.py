"""An actor that offers itself to a hub, and offers itself again to each of the hub's next lives.

    on_start ─ keep_registered(hub, offer) ─▶ ask ─▶ watch ──Down──▶ ask again, with backoff, until it is answered

A hub that is restarted by its supervisor keeps its address and forgets who had registered: without this a service
would be alive and never be found.
"""

from __future__ import annotations

from actors.core.actor import Actor, handles
from actors.core.errors import AskError
from actors.core.message import Message
from actors.core.watch import Down
from transport.address import ActorAddress


class RegisteredActor(Actor):
    """Base of services. Call ``keep_registered`` once, when ready to serve."""

    _hub: ActorAddress | None = None
    _offer: Message
    _answer: type[Message]

    async def keep_registered(self, hub: ActorAddress, offer: Message, answer: type[Message]) -> None:
        """Offer ourselves to ``hub``; ``offer`` is repeated, so it must be idempotent.

        Raises:
            AskError: the hub does not answer the first time.
        """
        self._hub, self._offer, self._answer = hub, offer, answer
        await self._register()

    async def registered(self) -> None:
        """Called after every registration; override to say what the hub has to know."""

    async def _register(self) -> None:
        assert self._hub is not None
        await self.ctx.ref(self._hub).ask(self._offer, self._answer)
        self.ctx.watch(self._hub)
        await self.registered()

    @handles(Down)
    async def hub_down(self, message: Down) -> None:
        if message.address == self._hub:
            self.ctx.start_task(self._register_again(), "register again")

    async def _register_again(self) -> None:
        delay_s = self.ctx.limits.backoff_first_s
        while True:
            await self.ctx.sleep(delay_s)
            try:
                return await self._register()
            except AskError as error:
                self.ctx.log.warning("the hub does not answer; trying again", error=str(error))
                delay_s = min(2 * delay_s, self.ctx.limits.backoff_max_s)
