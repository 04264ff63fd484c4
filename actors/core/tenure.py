"""An actor's lease with its leader: held while the leader renews it, lapsed by itself when it does not.

    begin ─▶ held ── every quarter of the term: RenewLease ──▶ LeaseRenewed ─▶ held …
              ├─ no answer: asked again, until the term less its margin is over ─▶ lapsed ─▶ on_lapse, once
              └─ refused: the leader does not know this life, or no longer ──────▶ lapsed ─▶ on_lapse, once

Invariants
- Whoever is cut off from its leader stops acting by its own clock, a margin before the leader gives it up.
- A leader that is being restarted is no partition yet: the term is longer than a restart takes (``limits.lease_s``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from actors.core.errors import AskError, RemoteError
from actors.core.lease import HeldLease, Lease
from actors.core.message import Message, message

if TYPE_CHECKING:
    from actors.core.context import Context
    from actors.core.ref import ActorRef

_ASKS_A_TERM: Final = 4


@message("core.renew_lease")
class RenewLease(Message):
    """Ask this to keep a lease; it is answered with LeaseRenewed, or an error of the leader: register anew."""

    job: str
    holder: str
    """Name of the actor; which life of it, is told by where the question comes from."""
    lease: int
    """Epoch of the lease itself."""


@message("core.lease_renewed")
class LeaseRenewed(Message):
    """The leader has renewed the same lease for another term."""

    lease: int
    lease_s: float


class Tenure:
    """A tenure keeps one actor's lease. ``on_lapse`` is called on the loop; ``begin`` may be called at any time."""

    def __init__(self, ctx: Context, on_lapse: Callable[[], None]) -> None:
        self._ctx = ctx
        self._on_lapse = on_lapse
        self._held = HeldLease(margin_s=ctx.limits.lease_margin_s)
        self._leader: ActorRef | None = None
        self._question = RenewLease(job="", holder="", lease=0)
        self._term_s = 0.0
        self._keeping = False

    @property
    def is_held(self) -> bool:
        """Whether the actor may act on its leader's behalf."""
        return self._held.is_held(self._ctx.now())

    def begin(self, leader: ActorRef, question: RenewLease, lease_s: float, *, asked_at_s: float) -> None:
        """Hold the lease that ``leader`` has just issued, in answer to what was asked at ``asked_at_s``."""
        self._leader, self._question, self._term_s = leader, question, lease_s
        self._accept(question.lease, lease_s, asked_at_s)
        if not self._keeping:
            self._keeping = True
            self._ctx.start_task(self._keep(), "keep the lease")

    def _accept(self, lease: int, lease_s: float, asked_at_s: float) -> None:
        self._held.accept(Lease(self._question.holder, lease, lease_s), asked_at_s=asked_at_s)

    async def _keep(self) -> None:
        while (left_s := self._held.left_s(self._ctx.now())) > 0:
            await self._ctx.sleep(min(left_s, self._term_s / _ASKS_A_TERM))
            await self._renew()
        self._keeping = False
        self._on_lapse()

    async def _renew(self) -> None:
        asked_at_s, leader, question = self._ctx.now(), self._leader, self._question
        left_s = self._held.left_s(asked_at_s)
        if leader is None or left_s <= 0:
            return
        try:
            renewed = await leader.ask(question, LeaseRenewed, min(left_s, self._term_s / _ASKS_A_TERM))
        except RemoteError as error:
            if question is self._question:  # else it has been issued anew meanwhile
                self._ctx.log.warning("the leader does not renew the lease", error=str(error))
                self._held.lapse()
        except AskError:
            return  # asked again until the term is over
        else:
            self._accept(renewed.lease, renewed.lease_s, asked_at_s)
