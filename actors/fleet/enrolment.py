"""Workers on the journaled: they register, keep their leases, are replaced by later lives of their name, and leave.

    RegisterWorker ─▶ the former life of that name is lost ─▶ entered, watched, issued ─▶ it goes on with what it holds
    RenewLease ─────▶ for another term               lease lapsed, Leaving ─▶ lost: its samples go on elsewhere

Invariants
- A worker that is on the journaled has a lease; one whose lease has lapsed has fenced itself, and is lost here too.
- A lease is numbered once in the life of a job: those of a later life of the scheduler are higher than all before.
- A life that comes back does not replace the one that was started in its stead.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from actors.core.tenure import LeaseRenewed, RenewLease
from actors.fleet.reattachment import Reattachment, TakenUp
from actors.fleet.recovery import Recoveries
from actors.fleet.returns import Returns
from actors.fleet.scope import JobScope
from actors.fleet.versions import Versions
from actors.fleet.workers import Worker
from actors.ledger.errors import NotAccepted
from actors.protocol.work import Drain
from actors.protocol.workers import Leaving, Registered, RegisterWorker

_LEASE_BITS: Final = 32
"""Bits of a lease's number below the term, so that a later life of the scheduler has higher numbers."""


class Enrolment:
    """It registers the workers of one life of the scheduler. Made after ``Opened``."""

    def __init__(
        self,
        scope: JobScope,
        versions: Versions,
        returns: Returns,
        reattachment: Reattachment,
        recoveries: Recoveries,
    ) -> None:
        self._scope = scope
        self._versions = versions
        self._returns = returns
        self._reattachment = reattachment
        self._recoveries = recoveries
        self._leases = scope.ledger.term << _LEASE_BITS

    def register(self, offer: RegisterWorker) -> Registered:
        """Raises:
        NotAccepted: another life of that name was started in its stead, or somebody else offers it.
        """
        sender = self._scope.ctx.sender
        if sender is None or sender.peer != offer.worker.peer:
            raise NotAccepted(f"{sender} offers {offer.worker}: a worker registers itself")
        scope, now = self._scope, self._scope.ctx.now()
        before = scope.workers.by_name.get(offer.worker.name)
        if before is not None:
            self._replace(before, offer)
        worker = scope.workers.add(offer, now)
        self._recoveries.begins(worker.name, again=before is not None and before.address.peer != worker.address.peer)
        scope.ctx.watch(worker.address)
        worker.pulls(self._versions.newest, now)
        self._leases += 1
        worker.issue(scope.limits.lease_s, self._leases, now)
        scope.event(
            "worker_registered",
            worker=worker.name,
            node=worker.node,
            slots=worker.slots,
            engine_start_s=round(offer.engine_start_s, 3),
        )
        taken = self._take_up(worker, offer)
        scope.assign()
        return Registered(
            term=scope.ledger.term,
            lease_s=scope.limits.lease_s,
            lease=self._leases,
            policy_version=self._versions.newest,
            weights=self._versions.weights,
            kept=np.array(taken.former, np.int64),
            numbers=np.array(taken.numbers, np.int64),
            lengths=np.array(taken.lengths, np.int32),
        )

    def _take_up(self, worker: Worker, offer: RegisterWorker) -> TakenUp:
        """Let it go on with what it has generated while there was no scheduler; the rest is for everybody."""
        taken = self._reattachment.take_up(offer)
        self._reattachment.release(worker.name)
        if taken.numbers:
            worker.in_flight += len(taken.numbers)
            fields = {"samples": len(taken.numbers), "claimed": len(offer.holds)}
            self._scope.event("samples_taken_up", worker=worker.name, **fields)
        return taken

    def _replace(self, before: Worker, offer: RegisterWorker) -> None:
        """Raises:
        NotAccepted: ``before`` is what was started in the stead of this life, which had been given up.
        """
        scope, other_life = self._scope, before.address.peer != offer.worker.peer
        if other_life and offer.again and not before.again:
            scope.event("worker_refused", worker=before.name, node=offer.node, why=f"replaced by {before.address}")
            raise NotAccepted(f"{before.address} has replaced {offer.worker}")
        if other_life:  # nobody would ever give it work again, so it must not believe that it is registered
            leave = Drain(job=offer.job, deadline_s=scope.limits.stop_timeout_s, reason="replaced")
            scope.tell(before.address, leave)
        self._returns.lose(before, "it registered anew")
        scope.ctx.unwatch(before.address)

    def leave(self, news: Leaving) -> None:
        """A worker says that it goes."""
        if (worker := self._scope.speaker(news.worker)) is not None:
            self._scope.event("worker_leaving", worker=worker.name, why=news.reason)
            self._scope.ctx.unwatch(worker.address)
            self._returns.lose(worker, news.reason)

    # ------------------------------------------------------------ leases

    def renew(self, question: RenewLease) -> LeaseRenewed:
        """Raises:
        NotAccepted: whoever asks holds no lease here.
        """
        limits = self._scope.limits
        if self._is_trainer(question.holder):
            return LeaseRenewed(lease=question.lease, lease_s=limits.lease_s)
        worker = self._scope.speaker(question.holder)
        lease = None if worker is None else worker.renew(question.lease, self._scope.ctx.now())
        if lease is None:
            raise NotAccepted(f"{question.holder} holds no such lease here: register anew")
        return LeaseRenewed(lease=lease.term, lease_s=lease.lasts_s)

    def _is_trainer(self, name: str) -> bool:
        """Whether whoever speaks is the trainer that serves now: it rules as long as no other one has registered."""
        trainer, sender = self._scope.services.get("trainer"), self._scope.ctx.sender
        return trainer is not None and sender is not None and (trainer.name, trainer.peer) == (name, sender.peer)

    def end_lapsed(self, now: float) -> None:
        """Their links are up, and they have not been able to renew: what they hold goes on elsewhere."""
        for worker in [worker for worker in self._scope.workers.by_name.values() if worker.has_lapsed(now)]:
            self._scope.event("worker_lease_lapsed", worker=worker.name, node=worker.node)
            self._scope.ctx.unwatch(worker.address)
            self._returns.lose(worker, "its lease has lapsed")
