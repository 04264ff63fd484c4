"""The fleet: who the rollout workers of a job are, what each of them generates, and what they are told to load.

    RegisterWorker, RenewLease ─▶ enrolment ─▶ worker table ◀─ versions ◀─ VersionAvailable, samples on disk
    queued samples ─▶ assign: seeding, dispatcher, balancing ─Assign, Revoke─▶ workers
    workers ─TokenReport─▶ inflow ────┐
    gone, failed, leaving ─▶ returns ┴─▶ ledger ─▶ ``finished``: to be scored; ``settled``: samples were dropped

The fleet knows workers and samples, and not how a job advances. The scheduler of a job holds a fleet, tells it what the
trainer has and what is committed, and is told by two callbacks what has ended.

    enrolment     who is a worker, and its lease           dispatch      who generates what
    versions      what workers are told to load            balancing     samples that are better off elsewhere
    planned       who generates a step, and who sleeps     cuts          parts of it that are nearly done
    inflow        tokens from workers                      departures    workers that were given notice
    returns       samples that come back from workers      seeding       when the trainer's machine generates
    reattachment, unexplained, recovery: what is known of lives that have ended        scope: what they share
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from actors.core.watch import Down, Gone
from actors.fleet.balancing import Balancing
from actors.fleet.departures import Departures
from actors.fleet.dispatch import Dispatcher
from actors.fleet.enrolment import Enrolment
from actors.fleet.inflow import Inflow
from actors.fleet.length_ranking import LengthRanking, make_predictor
from actors.fleet.long_lanes import LongLanes
from actors.fleet.planned import Planned
from actors.fleet.reattachment import EndOfGrace, Reattachment
from actors.fleet.recovery import Recoveries
from actors.fleet.returns import NoWord, Returns, Rows
from actors.fleet.scope import JobScope
from actors.fleet.seeding import Seeding
from actors.fleet.seeding_estimate import SeedingEstimate
from actors.fleet.versions import Versions
from actors.ledger.batch import StepBatch
from actors.protocol.batches import IssueBatch
from actors.protocol.evaluations import is_evaluation
from actors.protocol.workers import WorkerAsleep, WorkerEnded, WorkerVersion


class Fleet:
    """It builds and holds the parts of one job's fleet. Made after ``Opened``, once for each life of the scheduler."""

    def __init__(self, scope: JobScope, finished: Callable[[Rows], None], settled: Callable[[int], None]) -> None:
        """``finished`` gets the rows, by step, that have all their tokens; ``settled`` the step of dropped samples."""
        job, limits, scheduling = scope.job, scope.limits, scope.job.scheduling
        self._scope = scope
        self.recoveries = Recoveries(scope.ledger)
        self.versions = Versions(scope)
        planned = scheduling.policy == "planned"
        predictor = make_predictor(job.rollout.length_ranking, limits, newest_epoch_only=planned)
        self.ranking = LengthRanking(job.name, predictor)
        self.ranking.restore(scope.ledger)
        lanes = LongLanes(dedicates=job.rollout.dedicated_workers != "none")
        balanced = scheduling.policy == "rlboost"
        self._dispatcher = Dispatcher(
            job.name, scope.journaled, scope.workers, job.staleness, limits, scope.tell, self.ranking,
            one_step=job.sync.mode == "one_step_barrier",
            lanes=lanes,
            pending_max=limits.pending_samples_max if balanced else None,
        )  # fmt: skip
        self._dispatcher.kept_back = self._kept_back
        self._planned = Planned(scope, self.versions, self.ranking) if planned else None
        if self._planned is not None:
            self._dispatcher.in_parts = self._planned.mark
        self._balancing = Balancing(scope, lanes, relief=scheduling.relief) if balanced else None
        self._seeding = Seeding(scope, self.versions, self._estimate()) if scheduling.seeding else None
        self.departures = Departures(scope)
        self._reattachment = Reattachment(scope.journaled, job.staleness)
        self.returns = Returns(scope, self.recoveries, finished, settled)
        self.enrolment = Enrolment(scope, self.versions, self.returns, self._reattachment, self.recoveries)
        self.inflow = Inflow(scope, self.returns)
        if self._reattachment.awaited:
            scope.ctx.send_after(limits.reattach_s, EndOfGrace())

    def _estimate(self) -> SeedingEstimate | None:
        scope, job = self._scope, self._scope.job
        if job.scheduling.seeding_end != "estimated":
            return None
        look_s = scope.limits.seeding_look_s
        return SeedingEstimate(scope.ledger, self.ranking, look_s, max_staleness=job.staleness)

    # ------------------------------------------------------------ who generates what

    def assign(self) -> None:
        """Hand out what is queued, as credit allows. Cheap where there is nothing to do."""
        scope, now = self._scope, self._scope.ctx.now()
        if self._seeding is not None:
            self._seeding.look(now)
        if scope.ledger.paused:
            if self._planned is not None:
                self._planned.pause(now)
            return
        if self._planned is not None:
            self._planned.look(now)
        if self._dispatcher.assign(now):
            for loss in self.recoveries.assigned(now):
                scope.event("samples_reassigned", worker=loss.part, samples=loss.samples, after_s=loss.after_s)
        if self._balancing is not None:
            self._balancing.look(now)
        if self._planned is not None:
            self._planned.after(now)

    def _kept_back(self, step: int) -> np.ndarray:
        return np.concatenate([self.returns.kept_back(step), self._reattachment.kept_back(step)])

    def tick(self, now: float) -> None:
        """Do what depends on time alone."""
        self.enrolment.end_lapsed(now)
        self.versions.tell_again(now)
        for name, numbers in self._dispatcher.overdue(now).items():
            worker = self._scope.workers.by_name[name]
            self.returns.revoke(worker, numbers, "it takes long to load the version that they need")

    # ------------------------------------------------------------ what workers, and others of them, say

    def serves(self, news: WorkerVersion) -> bool:
        """A worker has loaded a version; False if it is none of ours."""
        worker = self._scope.speaker(news.worker)
        if worker is None:
            return False
        worker.serves(news.policy_version)
        worker.heard_s = self._scope.ctx.now()
        worker.transfer_s = news.pull_s + news.load_s
        self._scope.workers.loads.note(news)
        if self._planned is not None:
            self._planned.serves(worker)
        took = {"pull_s": round(news.pull_s, 4), "load_s": round(news.load_s, 4), "wire_bytes": news.wire_bytes}
        self._scope.record("worker_version", worker=worker.name, version=news.policy_version, **took)
        self.assign()
        return True

    def asleep(self, news: WorkerAsleep) -> bool:
        """A worker sleeps, or is awake, as it was told; False if it is none of ours."""
        worker, listens = self._scope.speaker(news.worker), self._seeding or self._planned
        if worker is None or listens is None:
            return False
        listens.heard(worker, news)
        return True

    def ended(self, news: WorkerEnded) -> None:
        """The machine of a worker says how its process ended."""
        if self.returns.ended(news):
            self._reattachment.release(news.worker)
            self.assign()

    def no_word(self, about: NoWord) -> None:
        """Nobody has said how a worker ended: its samples are kept back no longer."""
        if self.returns.no_word(about):
            self.assign()

    def end_of_grace(self) -> None:
        """A worker that has not come back by now goes on with nothing."""
        self._reattachment.release()
        self.assign()

    def down(self, news: Down) -> None:
        """A link has ended, perhaps that to a worker."""
        worker = self._scope.workers.at(news.address)
        if worker is not None:
            if news.reason is not Gone.STOPPED:
                self.recoveries.mark_crashed(worker.name)
            self.returns.down(worker, news)

    # ------------------------------------------------------------ the trainer and its steps

    def issued(self, batch: IssueBatch) -> None:
        """The prompts of a step are there."""
        if self._planned is not None:
            self._planned.issued(batch)

    def holds(self, batch: StepBatch) -> bool:
        """Whether the trainer has to wait for groups of ``batch``: its own machine generates."""
        return self._seeding is not None and self._seeding.holds(batch)

    def trainer_opened(self, step: int) -> None:
        """The trainer has this step open now and nothing that it was given before; -1: it has none open."""
        if self._seeding is not None:
            self._seeding.trainer_opened(step)

    def trainer_given(self, batch: StepBatch, rows: np.ndarray) -> None:
        """The trainer has been given ``rows`` to train."""
        if self._seeding is not None:
            self._seeding.trainer_given(batch, rows)

    def committed(self, batch: StepBatch, trainer: Mapping[str, float], *, replay: bool) -> dict[str, float]:
        """Learn from a committed step, of which the trainer says this; returns its columns of metrics.jsonl."""
        if replay:
            return self.recoveries.metrics()
        metrics = self.ranking.committed(batch)
        ranker, lesson = self._scope.services.get("ranker"), self.ranking.lesson(batch)
        if ranker is not None and lesson is not None:
            self._scope.tell(ranker, lesson)
        metrics |= self.recoveries.metrics()
        if self._seeding is not None:
            metrics |= self._seeding.committed(batch.step, trainer)
        if self._planned is not None:
            metrics |= self._planned.committed(batch)
            self.assign()  # the next step may be planned now
        return metrics

    def ask_ranker(self, batches: Iterable[StepBatch]) -> None:
        """Ask how long the responses to these will be. Nobody waits for the answer."""
        if (ranker := self._scope.services.get("ranker")) is not None:
            open_steps = (batch for batch in batches if not batch.committed and not is_evaluation(batch.step))
            for question in (self.ranking.question(batch) for batch in open_steps):
                if question is not None:
                    self._scope.tell(ranker, question)
