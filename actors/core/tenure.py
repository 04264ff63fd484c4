"""An actor's lease with its leader: held while the leader renews it, lapsed by itself when it does not.

    begin ─▶ held ── every quarter of its time: RenewLease ──▶ LeaseRenewed ─▶ held …
              ├─ no answer: asked again, until the time less its margin is over ─▶ lapsed ─▶ on_lapse, once
              └─ refused: the leader does not know this life, or no longer ──────▶ lapsed ─▶ on_lapse, once

The holder asks four times in the time of one lease (a client of DHCP asks twice), so one lost answer costs nothing.

Invariants
- An actor that is cut off from its leader stops acting by its own clock, a margin before the leader gives it up.
- A restart of the leader does not make a lease lapse: it lasts longer than a restart takes (``limits.lease_s``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from actors.core.errors import AskError, RemoteError
from actors.core.lease import HeldLease, Lease, LeaseIssuer
from actors.core.message import Message, message

if TYPE_CHECKING:
    from actors.core.context import Context
    from actors.core.ref import ActorRef

_ASKS_A_LEASE: Final = 4


@message("core.renew_lease")
class RenewLease(Message):
    """The holder asks to keep its lease. Reply: LeaseRenewed, or an error, after which it has to register anew."""

    job: str
    holder: str
    """Name of the actor; the sender's address tells which life of it asks."""
    lease: int
    """Number of the lease."""


@message("core.lease_renewed")
class LeaseRenewed(Message):
    """The leader has renewed the lease."""

    lease: int
    lease_s: float
    """Seconds for which the lease holds from now on."""


class Tenure:
    """A tenure keeps one actor's lease. ``on_lapse`` is called on the loop; ``begin`` may be called at any time.

    tenure = Tenure(ctx, on_lapse=self.lease_lapsed)
    asked_at_s = ctx.now()                                   # before the question: the issuer's clock starts later
    answer = await leader.ask(offer, Registered)             # the leader issues a lease in its answer
    tenure.begin(leader, RenewLease(job="a", holder="rollout-0", lease=answer.lease), answer.lease_s,
                 asked_at_s=asked_at_s)
    ...
    tenure.is_held                                           # False from the lapse on, until the next ``begin``
    """

    def __init__(self, ctx: Context, on_lapse: Callable[[], None]) -> None:
        self._ctx = ctx
        self._on_lapse = on_lapse
        self._held = HeldLease(margin_s=ctx.limits.lease_margin_s)
        self._leader: ActorRef | None = None
        self._question = RenewLease(job="", holder="", lease=0)
        self._lasts_s = 0.0
        self._keeping = False

    @property
    def is_held(self) -> bool:
        """Whether the actor may act on its leader's behalf."""
        return self._held.is_held(self._ctx.now())

    def begin(self, leader: ActorRef, question: RenewLease, lease_s: float, *, asked_at_s: float) -> None:
        """Hold the lease that ``leader`` has just issued, in answer to what was asked at ``asked_at_s``."""
        self._leader, self._question, self._lasts_s = leader, question, lease_s
        self._accept(question.lease, lease_s, asked_at_s)
        if not self._keeping:
            self._keeping = True
            self._ctx.start_task(self._keep(), "keep the lease")

    def _accept(self, lease: int, lease_s: float, asked_at_s: float) -> None:
        self._held.accept(Lease(self._question.holder, lease, lease_s), asked_at_s=asked_at_s)

    async def _keep(self) -> None:
        while (left_s := self._held.left_s(self._ctx.now())) > 0:
            await self._ctx.sleep(min(left_s, self._lasts_s / _ASKS_A_LEASE))
            await self._renew()
        self._keeping = False
        self._on_lapse()

    async def _renew(self) -> None:
        asked_at_s, leader, question = self._ctx.now(), self._leader, self._question
        left_s = self._held.left_s(asked_at_s)
        if leader is None or left_s <= 0:
            return
        try:
            renewed = await leader.ask(question, LeaseRenewed, min(left_s, self._lasts_s / _ASKS_A_LEASE))
        except RemoteError as error:
            if question is self._question:  # else a new lease has been issued meanwhile
                self._ctx.log.warning("the leader does not renew the lease", error=str(error))
                self._held.lapse()
        except AskError:
            return  # no answer is no refusal: asked again until the lease's time is over
        else:
            self._accept(renewed.lease, renewed.lease_s, asked_at_s)


def renewed(lease: LeaseIssuer | None, question: RenewLease, holder: str, now_s: float) -> LeaseRenewed | None:
    """A leader's answer to ``holder``, whose ``lease`` it issued; None if that has lapsed, or another one is meant."""
    kept = None if lease is None else lease.renew(holder, question.lease, now_s)
    return None if kept is None else LeaseRenewed(lease=kept.number, lease_s=kept.lasts_s)
