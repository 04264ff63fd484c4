"""The address that serves each role of which a job has one: trainer, weights, rewards, prompts, ranker, job, each rank.

    RegisterService ─▶ watched ─▶ whoever waits for that role is told     Down ─▶ nobody serves, until the next life
    LookupService ───▶ who serves now

Invariants
- One address per role, that of the newest life that has registered.
- A rank registers only itself, from a machine on which the job may have it (``JobConfig.ranks_here``).
- A rank that follows a leader is no service of the job: only its leader's restarts are reported.
"""

from __future__ import annotations

from actors.core.senders import HEAD, SenderKind, sender_of
from actors.core.watch import Down, Gone
from actors.fleet.fleet import Fleet
from actors.fleet.scope import JobScope
from actors.protocol.failures import NotAccepted
from actors.protocol.services import RegisterService
from actors.scheduler.grants import Grants
from actors.scheduler.scoring import Scoring
from actors.scheduler.steps import Steps
from configs.names import follows, leader_of, rank_of
from transport.address import ActorAddress, PeerId


class Services:
    """The services are kept in ``scope.services``, a table that others read and only this class writes."""

    def __init__(self, scope: JobScope, fleet: Fleet, scoring: Scoring, grants: Grants, steps: Steps) -> None:
        self._scope = scope
        self._fleet = fleet
        self._scoring = scoring
        self._steps = steps
        self._grants = grants

    def register(self, offer: RegisterService, sender: PeerId | None) -> None:
        """Raises:
        NotAccepted: a rank registers another process than itself, or runs on the wrong machine.
        """
        scope, role = self._scope, offer.role
        is_rank = follows(role)
        by_rank = sender is not None and sender_of(sender.name).kind is SenderKind.RANK
        if by_rank and (not is_rank or (role, sender) != (offer.address.name, offer.address.peer)):
            raise NotAccepted(f"{sender} offers {offer.address} as {role}: a rank registers itself alone")
        if by_rank and leader_of(role) == "trainer" and rank_of(role) < scope.job.ranks_here and not _is_here(sender):
            raise NotAccepted(f"{sender} offers {offer.address} as {role}, which is to be on the head's machine")
        before = scope.services.get(role)
        scope.services[role] = offer.address
        if before != offer.address and not is_rank:
            self._fleet.recoveries.begins(role, again=before is not None and before.peer != offer.address.peer)
            scope.event("service_registered", role=role, address=str(offer.address))
        if before not in (None, offer.address):
            scope.ctx.unwatch(before)
        scope.ctx.watch(offer.address)
        if role == "rewards":
            self._scoring.serve(offer.address)
        elif role == "job":
            scope.tell_untold()
            self._steps.job_registered()
        elif role == "prompts" and before != offer.address:
            self._steps.ask_again()
        elif role in ("weights", "trainer") and before != offer.address:
            self._fleet.versions.introduce_weights()
        elif role == "ranker" and before != offer.address:
            self._fleet.ask_ranker(scope.ledger.batches.values())

    def down(self, news: Down) -> None:
        """Remove from the table the actor that has ended."""
        scope = self._scope
        for role, address in list(scope.services.items()):
            if _same_life(address, news.address):
                scope.event("service_down", role=role, reason=news.reason, detail=news.detail)
                if news.reason is not Gone.STOPPED and not follows(role):
                    self._fleet.recoveries.mark_crashed(role)
                if role == "trainer":
                    self._fleet.recoveries.lost(role, scope.ctx.now())
                del scope.services[role]
                if role == "rewards":
                    self._scoring.serve(None)
        if self._grants.trainer is not None and _same_life(self._grants.trainer, news.address):
            self._grants.close()


def _is_here(sender: PeerId | None) -> bool:
    """Whether that process is on the head's machine."""
    return sender is not None and sender_of(sender.name).node == HEAD


def _same_life(one: ActorAddress, other: ActorAddress) -> bool:
    """Whether both are one life of one actor. The endpoint is only a way to get there: a sender's may be empty."""
    return (one.name, one.peer) == (other.name, other.peer)
