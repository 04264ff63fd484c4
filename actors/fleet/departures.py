"""Workers that were given notice: what becomes of their samples, and when.

    Draining ─▶ no further work for the worker ─▶ policies.migrate.decide ─▶ Revoke samples that it has not begun
             └─ ``hand_over_s`` before its end ─▶ policies.migrate.decide ─▶ Revoke samples that still run ─▶ Leaving

Invariants
- Running samples go on until shortly before the worker's end, and their tokens are entered like any others. Samples
  that are taken back continue elsewhere after the last token that their worker has reported, as in balancing.
- No order has to arrive: the worker hands its samples back by itself before its end, and if it dies before that, its
  samples return like those of any lost worker.
"""

from __future__ import annotations

import numpy as np

from actors.core.message import Message, message
from actors.fleet.scope import JobScope
from actors.fleet.workers import Worker
from actors.ledger.batch import SampleState
from actors.policies.assigning import migrate
from actors.policies.assigning.migrate import HeldSample
from actors.protocol.work import Revoke
from actors.protocol.workers import Draining
from transport.address import ActorAddress


@message("scheduler.end_of_notice")
class EndOfNotice(Message):
    """The scheduler reminds itself with this that a worker's life is to hand over the samples that it still runs."""

    worker: ActorAddress


class Departures:
    """The departures take samples back from workers that will leave."""

    def __init__(self, scope: JobScope) -> None:
        self._scope = scope

    def noticed(self, news: Draining) -> None:
        """A worker says that it will leave. Of several notices, the one that ends first counts."""
        scope, now = self._scope, self._scope.ctx.now()
        if (worker := scope.speaker(news.worker)) is None:
            return
        worker.leaves_s = min(worker.leaves_s, now + news.left_s)
        held = len(scope.ledger.in_flight(worker.name))
        scope.event("worker_draining", worker=worker.name, why=news.reason, left_s=round(news.left_s, 3), samples=held)
        runs_s = worker.leaves_s - now - scope.limits.hand_over_s
        if runs_s > 0:
            scope.ctx.send_after(runs_s, EndOfNotice(worker=worker.address))
        self._take_back(worker, worker.leaves_s - now)

    def end_of_notice(self, about: EndOfNotice) -> None:
        """A worker's notice is nearly over: take back what it still runs, if it is still there."""
        if (worker := self._scope.workers.at(about.worker)) is not None:
            self._take_back(worker, 0.0)

    def _take_back(self, worker: Worker, left_s: float) -> None:
        scope = self._scope
        moves = migrate.decide(self._held(worker), left_s, margin_s=scope.limits.hand_over_s)
        if moves:
            numbers = np.array([move.sample for move in moves], np.int64)
            scope.tell(worker.address, Revoke(job=scope.name, term=scope.ledger.term, assignments=numbers))
            left_s = round(worker.leaves_s - scope.ctx.now(), 3)
            scope.record("samples_taken_back", worker=worker.name, samples=len(moves), left_s=left_s)

    def _held(self, worker: Worker) -> list[HeldSample]:
        """All samples that the worker holds."""
        ledger = self._scope.ledger
        held: list[HeldSample] = []
        for step, rows in ledger.located(worker.name, ledger.in_flight(worker.name)).items():
            batch = ledger.batches[step]
            columns = (batch.assignment[rows], batch.length[rows], batch.state[rows] == SampleState.STREAMING)
            for number, tokens, running in zip(*(column.tolist() for column in columns), strict=True):
                held.append(HeldSample(number, tokens, running))
        return held
