"""Samples that come back from a worker: because it is gone, has failed, or is to have them no longer.

    worker gone ──▶ lose ─────┐                 ┌─▶ queued: from where the ledger has them, to somebody else
    revoked ──────▶ revoke ───┼─▶ Returned ─────┼─▶ finished, if the tokens already end them
    failed there ─▶ failed ───┘                 └─▶ dropped, with the reason: moved too often, poison
    crash ────────▶ isolate: with whomever the suspects are by now

Invariants
- A worker's ``in_flight`` falls by what the ledger says has ended, and by nothing else.
- A prompt is set aside only for engines that crashed while they held it, or for what failed with blame.
- Of a worker that fell silent nothing is handed out before it is known, or unknowable, whether it crashed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from actors.core.message import Message, message
from actors.core.watch import Down, Gone
from actors.fleet.recovery import Recoveries
from actors.fleet.scope import JobScope
from actors.fleet.unexplained import Rows, Unexplained
from actors.fleet.workers import Worker
from actors.ledger import events as ev
from actors.ledger.batch import SampleState, StepBatch
from actors.ledger.outcome import Outcome
from actors.protocol.evaluations import name_of_batch
from actors.protocol.failures import FailureKind
from actors.protocol.work import Revoke
from actors.protocol.workers import AssignmentsFailed, WorkerEnded


@message("scheduler.no_word")
class NoWord(Message):
    """The scheduler tells itself that nobody has said in time how that life of a worker ended."""

    incarnation: int


class Returns:
    """It takes samples back. ``finished`` gets those that turn out to have ended; ``settled(step)`` follows a drop."""

    def __init__(
        self,
        scope: JobScope,
        recoveries: Recoveries,
        finished: Callable[[Rows], None],
        settled: Callable[[int], None],
    ) -> None:
        self._scope = scope
        self._recoveries = recoveries
        self._finished = finished
        self._settled = settled
        self.waiting: Callable[[Rows], None] = lambda _: None
        """Callback that gets the episodes, by step, whose turns are over."""
        self._unexplained = Unexplained(scope.ledger, scope.limits.ended_lives)

    def kept_back(self, step: int) -> np.ndarray:
        """int32[n] rows of ``step`` that are not to be handed out yet."""
        return self._unexplained.kept_back(step)

    def after(self, outcome: Outcome) -> None:
        """Carry on with what an event has set free."""
        for name, hand_outs in outcome.ended.items():
            if (worker := self._scope.workers.by_name.get(name)) is not None:
                worker.in_flight -= hand_outs
        if outcome.finished:
            self._finished(outcome.finished)
        if outcome.waiting:
            self.waiting(outcome.waiting)
        for step, rows in outcome.queued.items():
            self._drop_hopeless(self._scope.ledger.batches[step], rows, "it has moved too often")
        if outcome.ended:
            self._scope.assign()

    def revoke(self, worker: Worker, assignments: np.ndarray, why: str) -> None:
        """End these hand-outs here at once and there as soon as possible."""
        if len(assignments):
            self.stop(worker, assignments)
            self.after(self._scope.journaled.apply(ev.Returned(worker.name, assignments, why)))

    def failed(self, news: AssignmentsFailed) -> None:
        """A worker could not go on with some."""
        scope, kind = self._scope, news.failure.kind
        if (worker := scope.speaker(news.worker)) is None:
            return
        located = scope.ledger.located(worker.name, news.assignments)
        scope.event("assignments_failed", worker=worker.name, kind=kind, why=news.failure.message)
        if kind is FailureKind.INFRASTRUCTURE:
            worker.rest(scope.ctx.now(), scope.limits.backoff_first_s, scope.limits.backoff_max_s)
        blame, why = kind in (FailureKind.DATA, FailureKind.BUG), f"{kind}: {news.failure.message}"
        outcome = scope.journaled.apply(ev.Returned(worker.name, news.assignments, why, blame))
        for step, rows in located.items():
            self._drop_hopeless(scope.ledger.batches[step], rows, why)
        self.after(outcome)

    def down(self, worker: Worker, news: Down) -> None:
        """The link to a worker says that it has ended."""
        self._scope.event("worker_down", worker=worker.name, reason=news.reason, detail=news.detail)
        crashed = news.reason is Gone.CRASHED or (news.reason is Gone.UNREACHABLE and self._has_crashed(worker))
        self.lose(worker, f"{news.reason} {news.detail}".strip(), crashed=crashed)

    def lose(self, worker: Worker, why: str, *, crashed: bool = False) -> None:
        """A worker is gone: its samples go on elsewhere at once."""
        scope = self._scope
        scope.workers.by_name.pop(worker.name, None)
        numbers = scope.ledger.in_flight(worker.name)
        if len(numbers):
            scope.event("samples_returned", worker=worker.name, samples=len(numbers), why=why)
            outcome = scope.journaled.apply(ev.Returned(worker.name, numbers, why, crashed=crashed))
            now = scope.ctx.now()
            self._recoveries.lost_worker(worker.name, outcome.queued, silent_s=now - worker.heard_s, now=now)
            for step in outcome.queued:
                self._drop_poison(scope.ledger.batches[step])
            self.after(outcome)

    # ------------------------------------------------------------ crashes

    def _has_crashed(self, worker: Worker) -> bool:
        """What is known of one that cannot be reached; if that is nothing, its samples are kept back for a while."""
        incarnation = worker.address.peer.incarnation
        crashed = self._unexplained.end_of(incarnation)
        held = self._scope.ledger.located(worker.name, self._scope.ledger.in_flight(worker.name))
        if crashed is None and held:
            self._unexplained.add(incarnation, held)
            self._scope.ctx.send_after(self._scope.limits.end_news_s, NoWord(incarnation=incarnation))
        return bool(crashed)

    def no_word(self, about: NoWord) -> bool:
        """Whether its samples had been kept back until now."""
        return self._unexplained.release(about.incarnation)

    def ended(self, news: WorkerEnded) -> bool:
        """Its machine says how it ended. False: its Down is still on its way."""
        worker = self._scope.workers.by_name.get(news.worker)
        if worker is not None and worker.address.peer.incarnation == news.incarnation:
            self._unexplained.note_end(news.incarnation, crashed=news.crashed)
            return False
        held = self._unexplained.explain(news.incarnation)
        if held and news.crashed:
            self._scope.event("worker_crashed", worker=news.worker, detail=news.detail)
            self._isolate(news.worker, held)
        return True

    def _isolate(self, name: str, held: Rows) -> None:
        """Suspect samples that an engine held when it crashed; take back those that have gone on elsewhere since."""
        scope, batches = self._scope, self._scope.ledger.batches
        steps = np.concatenate([np.full(len(rows), step, np.int32) for step, rows in held.items()])
        scope.journaled.apply(ev.Suspected(name, steps, np.concatenate(list(held.values()))))
        suspects = {step: rows[batches[step].crashes[rows] > 0] for step, rows in held.items()}
        why = "an engine has crashed with them"
        taken: list[Outcome] = []
        for worker in scope.workers.by_name.values():
            numbers = scope.ledger.live_among(worker.name, suspects)
            if len(numbers):
                self.stop(worker, numbers)
                taken.append(scope.journaled.apply(ev.Returned(worker.name, numbers, why)))
        for step in held:
            self._drop_poison(batches[step])
        for outcome in taken:
            self.after(outcome)

    def stop(self, worker: Worker, assignments: np.ndarray) -> None:
        """Tell a worker to generate these no longer; what becomes of them is the caller's business."""
        order = Revoke(job=self._scope.name, term=self._scope.ledger.term, assignments=assignments)
        self._scope.tell(worker.address, order)

    # ------------------------------------------------------------ drops

    def _drop_poison(self, batch: StepBatch) -> None:
        """Set aside the prompts, with all their siblings that wait, that have taken as many engines as one may."""
        guilty = np.unique(np.nonzero(batch.crashes >= self._scope.limits.engine_crashes_max)[0] // batch.group_size)
        for index in guilty.tolist():
            rows = batch.group_rows(index)
            rows = rows[batch.state[rows] == SampleState.QUEUED]
            if len(rows):
                crashes = int(batch.crashes[rows].max())
                prompt = int(batch.prompts[index])
                why = f"{FailureKind.DATA}: poison, {crashes} engines crashed while they held prompt {prompt}"
                self._drop(batch, rows, why)

    def _drop_hopeless(self, batch: StepBatch, rows: np.ndarray, why: str) -> None:
        limits = self._scope.limits
        hopeless = (batch.failures[rows] > limits.data_retries) | (batch.attempts[rows] > limits.infrastructure_retries)
        rows = rows[hopeless & (batch.state[rows] == SampleState.QUEUED)]
        if len(rows):
            self._drop(batch, rows, why)

    def _drop(self, batch: StepBatch, rows: np.ndarray, why: str) -> None:
        self._scope.event("samples_dropped", step=batch.step, samples=len(rows), why=why)
        self._scope.trouble(
            "samples_set_aside", f"{len(rows)} samples of {name_of_batch(batch.step)} are set aside: {why}"
        )
        self._scope.journaled.apply(ev.Dropped(batch.step, rows, why))
        self._settled(batch.step)
