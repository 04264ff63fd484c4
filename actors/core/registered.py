"""An actor that its job's scheduler must know: it introduces itself, and again to each of the scheduler's next lives.

    register ─▶ find the scheduler's present life ─▶ introduce ─▶ watch it ─▶ registered
        ▲              └── no answer: with growing pauses, as long as the patience lasts ─▶ orphaned: it stops
        └── Down of the scheduler (scheduler_lost), or its lease has lapsed (lease_lapsed)

A restarted scheduler keeps its name and place (even if its whole process was restarted, see ``leader.py``) but forgets
who had registered: an actor that did not register again would be alive and never be found. For a node, the head's
register of nodes takes the scheduler's part.
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
    """Introduces itself to its scheduler, and again to each of the scheduler's next lives.

    Call ``obey`` first, or ``keep_registered``, which calls ``obey`` and then registers. ::

        class Ranker(RegisteredActor):
            async def on_start(self) -> None:
                offer = RegisterService(job="a", role="ranker", address=self.ctx.self_address)
                await self.keep_registered(scheduler, offer, Acknowledged)     # raises AskError: the start has failed
                # now the scheduler knows it; after the scheduler's Down it registers with the next life by itself
    """

    scheduler: Leader
    tenure: Tenure
    """Lease with the scheduler; an actor that gets one in answer to its introduction begins it in ``introduce``."""
    known_to: ActorAddress | None = None
    """Life of the scheduler that knows this actor; None while it registers."""
    _patience_s: float
    _introduction: Message
    _answer: type[Message]

    def obey(self, scheduler: ActorAddress, patience_s: float | None = None) -> None:
        """Say who the scheduler is, and for how long it may be away (default ``limits.orphan_grace_s``)."""
        self.scheduler = Leader(self.ctx, scheduler)
        self.tenure = Tenure(self.ctx, self.lease_lapsed)
        self._patience_s = self.ctx.limits.orphan_grace_s if patience_s is None else patience_s

    async def keep_registered(self, scheduler: ActorAddress, offer: Message, answer: type[Message]) -> None:
        """Send ``offer`` to ``scheduler`` until it answers; since ``offer`` is repeated, it must be idempotent.

        Raises:
            AskError: see ``register``.
        """
        self._introduction, self._answer = offer, answer
        self.obey(scheduler)
        await self.register()

    @property
    def is_registered(self) -> bool:
        """Whether the newest life of the scheduler that has been found knows this actor."""
        return self.known_to == self.scheduler.address

    async def register(self) -> None:
        """Introduce this actor to the scheduler's present life.

        Raises:
            AskError: the last failure, once the scheduler has been away for longer than it may be, or refuses for good.
        """
        self.known_to = None
        patience = Patience(self.ctx.limits, self.ctx.rng("patience"), self._patience_s)
        while True:
            try:
                scheduler = self.ctx.ref(await self.scheduler.find())
                await self.introduce(scheduler)
                break
            except AskError as error:
                self.ctx.log.warning("no answer to the registration; trying again", error=str(error))
                if error.permanent or not await patience.again():
                    raise
        self.known_to = scheduler.address
        self.ctx.watch(scheduler.address)
        await self.registered()

    def register_again(self) -> None:
        """Register in the background; if the scheduler stays away, this actor ends."""
        self.known_to = None
        self.ctx.start_task(self._register_or_stop(), "register again")

    async def _register_or_stop(self) -> None:
        try:
            await self.register()
        except AskError as error:
            self.ctx.log.error("whoever must know this actor stays away; stopping", error=str(error))
            self.ctx.stop("orphaned")

    async def introduce(self, scheduler: ActorRef) -> None:
        """Tell ``scheduler`` who this is. An override may ask more than once; if one ask fails, all are repeated."""
        await scheduler.ask(self._introduction, self._answer)

    async def registered(self) -> None:
        """Called after every registration; override to say what the scheduler has to know."""

    def scheduler_lost(self, message: Down) -> None:
        """Called when the life of the scheduler that knows this actor is gone."""
        self.register_again()

    def lease_lapsed(self) -> None:
        """Called when the scheduler has not confirmed the lease for too long, or has refused to."""

    @handles(Down)
    async def down(self, message: Down) -> None:
        if message.address == self.known_to:
            self.known_to = None
            self.scheduler_lost(message)
