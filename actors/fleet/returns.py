"""Takes samples back from a worker that is gone, that failed on them, or that is to stop generating them.

    worker gone ──▶ lose ─────┐                 ┌─▶ queued: to go on at another worker from the ledger's tokens
    revoked ──────▶ revoke ───┼─▶ Returned ─────┼─▶ finished, if the tokens already end them
    failed there ─▶ failed ───┘                 └─▶ dropped, with the reason: moved too often, poison
    crash ────────▶ isolate: suspects are taken back from the workers that hold them by now

Invariants
- A worker's ``in_flight`` falls by the assignments that the ledger says have ended, and by nothing else.
- Samples are dropped here only if engines crashed while they held the prompt, if they failed too often by their own
  fault, or if they have moved too often.
- Samples of a worker that fell silent are handed out only once its machine has said whether it crashed, or has been
  silent for too long.
"""

from __future__ import annotations

import numpy as np

from actors.core.message import Message, message
from actors.core.watch import Down, Gone
from actors.fleet.modes.mode import Mode
from actors.fleet.recovery import Recoveries
from actors.fleet.scope import FleetOwner, JobScope, Rows
from actors.fleet.workers import Worker
from actors.ledger import events as ev
from actors.ledger.batch import SampleState, StepBatch
from actors.ledger.ledger import Ledger
from actors.ledger.outcome import Outcome
from actors.protocol.evaluations import name_of_batch
from actors.protocol.failures import FailureKind
from actors.protocol.work import Revoke
from actors.protocol.workers import AssignmentsFailed, WorkerEnded


@message("scheduler.no_word")
class NoWord(Message):
    """The scheduler reminds itself with this that no news came in time of how a worker's life ended."""

    incarnation: int


class Returns:
    """The returns take samples back from workers."""

    def __init__(self, scope: JobScope, mode: Mode, recoveries: Recoveries, owner: FleetOwner) -> None:
        self._scope, self._mode, self._recoveries, self._owner = scope, mode, recoveries, owner
        self._unexplained = Unexplained(scope.ledger, scope.limits.ended_lives)

    def kept_back(self, step: int) -> np.ndarray:
        """int32[n] rows of ``step`` that are not to be handed out yet."""
        return self._unexplained.kept_back(step)

    def after(self, outcome: Outcome) -> None:
        """Act on the outcome of a ledger event: which samples ended, finished, or are queued again."""
        for name, hand_outs in outcome.ended.items():
            if (worker := self._scope.workers.by_name.get(name)) is not None:
                worker.in_flight -= hand_outs
        if outcome.finished:
            self._owner.finished(outcome.finished)
        if outcome.waiting:
            self._owner.turns_over(outcome.waiting)
        for step, rows in outcome.queued.items():
            self._drop_hopeless(self._scope.ledger.batches[step], rows, "it has moved too often")
        if outcome.ended:
            self._scope.assign()

    def revoke(self, worker: Worker, assignments: np.ndarray, why: str, *, blame: bool = False) -> None:
        """End these assignments in the ledger at once, and at the worker as soon as possible.

        ``blame``: whether the samples may be at fault; those that fail too often are dropped.
        """
        if len(assignments):
            self.stop(worker, assignments)
            located = self._scope.ledger.located(worker.name, assignments) if blame else {}
            outcome = self._scope.ledger_writer.apply(ev.Returned(worker.name, assignments, why, blame))
            for step, rows in located.items():
                self._drop_hopeless(self._scope.ledger.batches[step], rows, why)
            self.after(outcome)

    def failed(self, news: AssignmentsFailed) -> None:
        """A worker could not go on with some of its assignments."""
        scope, kind = self._scope, news.failure.kind
        if (worker := scope.speaker(news.worker)) is None:
            return
        located = scope.ledger.located(worker.name, news.assignments)
        scope.event("assignments_failed", worker=worker.name, kind=kind, why=news.failure.message)
        if kind is FailureKind.INFRASTRUCTURE:
            worker.rest(scope.ctx.now(), scope.limits.backoff_first_s, scope.limits.backoff_max_s)
        blame, why = kind in (FailureKind.DATA, FailureKind.BUG), f"{kind}: {news.failure.message}"
        outcome = scope.ledger_writer.apply(ev.Returned(worker.name, news.assignments, why, blame))
        for step, rows in located.items():
            self._drop_hopeless(scope.ledger.batches[step], rows, why)
        self.after(outcome)

    def down(self, worker: Worker, news: Down) -> None:
        """A worker's Down has come."""
        self._scope.event("worker_down", worker=worker.name, reason=news.reason, detail=news.detail)
        crashed = news.reason is Gone.CRASHED or (news.reason is Gone.UNREACHABLE and self._has_crashed(worker))
        self.lose(worker, f"{news.reason} {news.detail}".strip(), crashed=crashed)

    def lose(self, worker: Worker, why: str, *, crashed: bool = False) -> None:
        """A worker is gone: queue its samples again. Those that ``Unexplained`` keeps back are handed out later."""
        scope = self._scope
        if scope.workers.by_name.pop(worker.name, None) is not None:
            self._mode.gone(worker)
        numbers = scope.ledger.in_flight(worker.name)
        if len(numbers):
            scope.event("samples_returned", worker=worker.name, samples=len(numbers), why=why)
            outcome = scope.ledger_writer.apply(ev.Returned(worker.name, numbers, why, crashed=crashed))
            now = scope.ctx.now()
            self._recoveries.lost_worker(worker.name, outcome.queued, silent_s=now - worker.heard_s, now=now)
            for step in outcome.queued:
                self._drop_poison(scope.ledger.batches[step])
            self.after(outcome)

    # ------------------------------------------------------------ crashes

    def _has_crashed(self, worker: Worker) -> bool:
        """Whether an unreachable worker is known to have crashed. If unknown, its samples are kept back for a while."""
        incarnation = worker.address.peer.incarnation
        crashed = self._unexplained.end_of(incarnation)
        held = self._scope.ledger.located(worker.name, self._scope.ledger.in_flight(worker.name))
        if crashed is None and held:
            self._unexplained.add(incarnation, held)
            self._scope.ctx.send_after(self._scope.limits.end_news_s, NoWord(incarnation=incarnation))
        return bool(crashed)

    def no_word(self, about: NoWord) -> bool:
        """Keep back a life's samples no longer; True if they were kept back until now."""
        return self._unexplained.release(about.incarnation)

    def ended(self, news: WorkerEnded) -> bool:
        """The machine of a worker says how it ended; returns False if its Down is still on its way."""
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
        """Suspect the samples that an engine held when it crashed, and take back those that other workers have now."""
        scope, batches = self._scope, self._scope.ledger.batches
        steps = np.concatenate([np.full(len(rows), step, np.int32) for step, rows in held.items()])
        scope.ledger_writer.apply(ev.Suspected(name, steps, np.concatenate(list(held.values()))))
        suspects = {step: rows[batches[step].crashes[rows] > 0] for step, rows in held.items()}
        why = "an engine has crashed with them"
        taken: list[Outcome] = []
        for worker in scope.workers.by_name.values():
            numbers = scope.ledger.live_among(worker.name, suspects)
            if len(numbers):
                self.stop(worker, numbers)
                taken.append(scope.ledger_writer.apply(ev.Returned(worker.name, numbers, why)))
        for step in held:
            self._drop_poison(batches[step])
        for outcome in taken:
            self.after(outcome)

    def stop(self, worker: Worker, assignments: np.ndarray) -> None:
        """Tell a worker to stop generating these assignments; the caller changes the ledger."""
        order = Revoke(job=self._scope.name, term=self._scope.ledger.term, assignments=assignments)
        self._scope.tell(worker.address, order)

    # ------------------------------------------------------------ drops

    def _drop_poison(self, batch: StepBatch) -> None:
        """Drop the queued samples of prompts with which ``engine_crashes_max`` engines have crashed."""
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
        self._scope.ledger_writer.apply(ev.Dropped(batch.step, rows, why))
        self._owner.settled(batch.step)


class Unexplained:
    """The samples of workers that fell silent are kept back here until their machine has said how they ended.

        link lost ─▶ samples returned, kept back ─┬─ crashed ─▶ suspects: each prompt alone with a worker
                                                  ├─ killed, stopped ─▶ handed out
                                                  └─ no news for ``end_news_s`` ─▶ handed out; late news still counts

    A broken link does not say why it broke. Without the pause, a prompt that has just crashed an engine would be at the
    next one, among harmless prompts, before the crash is even known. In the ledger these samples are queued all the
    while. They are kept by the incarnation of the life that held them. A life is forgotten when its end is known, and
    the oldest one when there are too many.
    """

    def __init__(self, ledger: Ledger, lives_max: int) -> None:
        self._lives_max = lives_max
        self._ledger = ledger
        self._rows: dict[int, Rows] = {}
        self._kept_back: set[int] = set()
        self._ends: dict[int, bool] = {}
        """Incarnation of a life that has ended, but whose Down has not come yet → whether it crashed."""

    def note_end(self, incarnation: int, *, crashed: bool) -> None:
        """Note how a life ended, which its machine said before the link broke."""
        while len(self._ends) >= self._lives_max:
            del self._ends[next(iter(self._ends))]
        self._ends[incarnation] = crashed

    def end_of(self, incarnation: int) -> bool | None:
        """Whether that life crashed; None if its machine has not said. May be asked once."""
        return self._ends.pop(incarnation, None)

    def add(self, incarnation: int, rows: Rows) -> None:
        """Keep back ``rows``, whose worker cannot be reached any more."""
        while len(self._rows) >= self._lives_max:
            self.release(oldest := next(iter(self._rows)))
            del self._rows[oldest]
        self._rows[incarnation] = rows
        self._kept_back.add(incarnation)

    def release(self, incarnation: int) -> bool:
        """Keep back a life's samples no longer; False if they were not kept back."""
        kept = incarnation in self._kept_back
        self._kept_back.discard(incarnation)
        return kept

    def explain(self, incarnation: int) -> Rows:
        """Forget a life whose end is known; returns those of its samples that are still unfinished."""
        self.release(incarnation)
        unfinished: Rows = {}
        for step, rows in self._rows.pop(incarnation, {}).items():
            batch = self._ledger.batches.get(step)
            if batch is not None and len(left := rows[batch.state[rows] < SampleState.FINISHED]):
                unfinished[step] = left
        return unfinished

    def kept_back(self, step: int) -> np.ndarray:
        """int32[n] rows of ``step`` that are not to be handed out yet."""
        rows = [self._rows[life][step] for life in self._kept_back if step in self._rows[life]]
        return np.concatenate(rows) if rows else np.empty(0, np.int32)
