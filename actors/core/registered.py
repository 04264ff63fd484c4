"""An actor that a hub must know: it introduces itself, and again to each of the hub's next lives.

    register ─▶ find the hub's present life ─▶ introduce ─▶ watch it ─▶ registered
        ▲              └── no answer: with growing pauses, as long as the patience lasts ─▶ orphaned: it stops
        └── Down of the hub (hub_lost), or its lease has lapsed (lease_lapsed)

A hub that is restarted keeps its name and place and forgets who had registered, also if its whole process was
restarted (``leader.py``): without this an actor would be alive and never be found.
"""

from __future__ import annotations

from actors.core.actor import Actor, handles
from actors.core.errors import AskError
from actors.core.leader import Leader
from actors.core.message import Message
from actors.core.patience import Patience
from actors.core.ref import ActorRef
from actors.core.tenure import Tenure
from actors.core.watch import Down
from transport.address import ActorAddress


class RegisteredActor(Actor):
    """Actors that a hub must know derive from this class. ``obey`` comes first; a service calls ``keep_registered``."""

    hub: Leader
    tenure: Tenure
    """Lease that the hub may lease in answer to the introduction; who gets one begins it there."""
    known_to: ActorAddress | None = None
    """Life of the hub that knows this actor; None while it registers."""
    _patience_s: float
    _introduction: Message
    _answer: type[Message]

    def obey(self, hub: ActorAddress, patience_s: float | None = None) -> None:
        """Say who the hub is, and for how long it may be away (default ``limits.orphan_grace_s``)."""
        self.hub = Leader(self.ctx, hub)
        self.tenure = Tenure(self.ctx, self.lease_lapsed)
        self._patience_s = self.ctx.limits.orphan_grace_s if patience_s is None else patience_s

    async def keep_registered(self, hub: ActorAddress, offer: Message, answer: type[Message]) -> None:
        """Offer ourselves to ``hub`` until it answers; ``offer`` is repeated, so it must be idempotent.

        Raises:
            AskError: see ``register``.
        """
        self._introduction, self._answer = offer, answer
        self.obey(hub)
        await self.register()

    @property
    def is_registered(self) -> bool:
        """Whether the newest life of the hub that has been found knows this actor."""
        return self.known_to == self.hub.address

    async def register(self) -> None:
        """Introduce ourselves to the hub's present life.

        Raises:
            AskError: the last failure, when the hub has not answered for as long as it may be away, or never will.
        """
        self.known_to = None
        patience = Patience(self.ctx.limits, self.ctx.rng("patience"), self._patience_s)
        while True:
            try:
                hub = self.ctx.ref(await self.hub.find())
                await self.introduce(hub)
                break
            except AskError as error:
                self.ctx.log.warning("the hub does not answer; trying again", error=str(error))
                if error.permanent or not await patience.again():
                    raise
        self.known_to = hub.address
        self.ctx.watch(hub.address)
        await self.registered()

    def register_again(self) -> None:
        """Register in the background; if the hub stays away, this actor ends."""
        self.known_to = None
        self.ctx.start_task(self._register_or_stop(), "register again")

    async def _register_or_stop(self) -> None:
        try:
            await self.register()
        except AskError as error:
            self.ctx.log.error("the hub stays away; stopping", error=str(error))
            self.ctx.stop("orphaned")

    async def introduce(self, hub: ActorRef) -> None:
        """Tell ``hub`` who we are; override it to ask more than one question. It is repeated when an ask fails."""
        await hub.ask(self._introduction, self._answer)

    async def registered(self) -> None:
        """Called after every registration; override to say what the hub has to know."""

    def hub_lost(self, message: Down) -> None:
        """Called when the life of the hub that knows us is gone."""
        self.register_again()

    def lease_lapsed(self) -> None:
        """Called when the hub has not confirmed the lease for too long, or has refused to."""

    @handles(Down)
    async def down(self, message: Down) -> None:
        if message.address == self.known_to:
            self.known_to = None
            self.hub_lost(message)
