"""Workers of a job: they register, keep their leases, are replaced by later lives of their name, and leave.

    RegisterWorker ─▶ the former life of that name is lost ─▶ entered, watched, leased ─▶ goes on with its samples
    RenewLease ─────▶ its lease is prolonged         lease lapsed, Leaving ─▶ lost: its samples go on elsewhere

Invariants
- A registered worker has a lease. A worker whose lease has lapsed has stopped by itself, and is treated as lost.
- A lease's number is never used again within a job: a later life of the scheduler gives higher ones.
- A worker's life that comes back does not replace the one that was started in its place.
- A life that was dismissed for its nonsense registers no more; the next life of its name may.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from actors.core.lease import LeaseRoster
from actors.core.tenure import LeaseRenewed, RenewLease, renewed
from actors.fleet.modes.mode import Mode
from actors.fleet.reattachment import Reattachment, TakenUp
from actors.fleet.recovery import Recoveries
from actors.fleet.returns import Returns
from actors.fleet.scope import JobScope
from actors.fleet.versions import Versions
from actors.fleet.workers import Worker
from actors.protocol.failures import NotAccepted
from actors.protocol.work import Drain
from actors.protocol.workers import Leaving, Registered, RegisterWorker
from transport.address import PeerId


class Enrolment:
    """The enrolment registers workers with one life of the scheduler. It is made after ``Opened``."""

    def __init__(
        self,
        scope: JobScope,
        versions: Versions,
        mode: Mode,
        returns: Returns,
        reattachment: Reattachment,
        recoveries: Recoveries,
    ) -> None:
        self._scope = scope
        self._mode = mode
        self._versions = versions
        self._returns = returns
        self._reattachment = reattachment
        self._recoveries = recoveries
        self._dismissed: deque[PeerId] = deque(maxlen=scope.limits.ended_lives)
        self._leases = LeaseRoster(lasts_s=scope.limits.lease_s, leader_term=scope.ledger.term)

    def register(self, offer: RegisterWorker) -> Registered:
        """Raises:
        NotAccepted: another life of that name was started in its place, or another process makes the offer.
        """
        sender = self._scope.ctx.sender
        if sender is None or sender.peer != offer.worker.peer:
            raise NotAccepted(f"{sender} offers {offer.worker}: a worker registers itself")
        if sender.peer in self._dismissed:
            raise NotAccepted(f"{offer.worker} was dismissed: its reports were not those of a sound engine")
        scope, now = self._scope, self._scope.ctx.now()
        before = scope.workers.by_name.get(offer.worker.name)
        if before is not None:
            self._replace(before, offer)
        worker = scope.workers.add(offer, now)
        self._recoveries.begins(worker.name, again=before is not None and before.address.peer != worker.address.peer)
        scope.ctx.watch(worker.address)
        worker.pulls(self._versions.newest, now)
        worker.lease = self._leases.grant(str(worker.address.peer), now)
        self._mode.registered(worker, offer)
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
            lease_s=self._leases.lasts_s,
            lease=self._leases.newest,
            policy_version=self._versions.newest,
            weights=self._versions.weights,
            kept=np.array(taken.former, np.int64),
            numbers=np.array(taken.numbers, np.int64),
            lengths=np.array(taken.lengths, np.int32),
        )

    def _take_up(self, worker: Worker, offer: RegisterWorker) -> TakenUp:
        """Let a worker go on with samples that it held while there was no scheduler; the others go to any worker."""
        taken = self._reattachment.take_up(offer)
        self._reattachment.release(worker.name)
        if taken.numbers:
            worker.in_flight += len(taken.numbers)
            fields = {"samples": len(taken.numbers), "claimed": len(offer.holds)}
            self._scope.event("samples_taken_up", worker=worker.name, **fields)
        return taken

    def _replace(self, before: Worker, offer: RegisterWorker) -> None:
        """Raises:
        NotAccepted: ``before`` was started in place of the offering life, which had been given up.
        """
        scope, other_life = self._scope, before.address.peer != offer.worker.peer
        if other_life and offer.again and not before.again:
            scope.event("worker_refused", worker=before.name, node=offer.node, why=f"replaced by {before.address}")
            raise NotAccepted(f"{before.address} has replaced {offer.worker}")
        if other_life:  # it gets no more work, so it must not go on as if it were registered
            self._send_away(before, "replaced")
        self._returns.lose(before, "it registered anew")
        scope.ctx.unwatch(before.address)

    def _send_away(self, worker: Worker, why: str) -> None:
        order = Drain(job=self._scope.name, deadline_s=self._scope.limits.stop_timeout_s, reason=why)
        self._scope.tell(worker.address, order)

    def dismiss(self, worker: Worker, why: str) -> None:
        """Take a worker's lease, and have its process end; its samples go on elsewhere."""
        scope = self._scope
        scope.event("worker_dismissed", worker=worker.name, node=worker.node, why=why)
        scope.trouble("worker_dismissed", f"{worker.name} on {worker.node} loses its lease: {why}")
        self._dismissed.append(worker.address.peer)
        self._send_away(worker, "dismissed")
        scope.ctx.unwatch(worker.address)
        self._returns.lose(worker, why)

    def leave(self, news: Leaving) -> None:
        """A worker says that it leaves."""
        if (worker := self._scope.speaker(news.worker)) is not None:
            self._scope.event("worker_leaving", worker=worker.name, why=news.reason)
            self._scope.ctx.unwatch(worker.address)
            self._returns.lose(worker, news.reason)

    # ------------------------------------------------------------ leases

    def renew(self, question: RenewLease) -> LeaseRenewed:
        """Raises:
        NotAccepted: the asker holds no lease here.
        """
        if self._is_trainer(question.holder):
            return LeaseRenewed(lease=question.lease, lease_s=self._leases.lasts_s)
        worker = self._scope.speaker(question.holder)
        answer = worker and renewed(worker.lease, question, str(worker.address.peer), self._scope.ctx.now())
        if answer is None:
            raise NotAccepted(f"{question.holder} holds no such lease here: register anew")
        return answer

    def _is_trainer(self, name: str) -> bool:
        """Whether the sender is the trainer that serves now, which it does until another one registers."""
        trainer, sender = self._scope.services.get("trainer"), self._scope.ctx.sender
        return trainer is not None and sender is not None and (trainer.name, trainer.peer) == (name, sender.peer)

    def end_lapsed(self, now: float) -> None:
        """Give up workers whose lease has lapsed although their links are up: their samples go on elsewhere."""
        for worker in [worker for worker in self._scope.workers.by_name.values() if worker.has_lapsed(now)]:
            self._scope.event("worker_lease_lapsed", worker=worker.name, node=worker.node)
            self._scope.ctx.unwatch(worker.address)
            self._returns.lose(worker, "its lease has lapsed")
