"""The fleet: which rollout workers a job has, what each of them generates, and which versions they are told to load.

    RegisterWorker, RenewLease ─▶ enrolment ─▶ worker table ◀─ versions ◀─ VersionAvailable, samples on disk
    queued samples ─▶ assign: mode, dispatcher ─Assign─▶ workers ◀─Revoke, SetAsleep─ mode
    workers ─TokenReport─▶ inflow ────┐
    gone, failed, leaving ─▶ returns ┴─▶ ledger ─▶ owner: ``finished``, to be scored; ``settled``, as some were dropped

The fleet knows workers and samples, but not how a job advances. The scheduler of a job owns a fleet, tells it what the
trainer has and what is committed, and is told, as the ``FleetOwner``, which samples have ended.

    enrolment     registered workers and their leases      dispatch      which worker generates what
    versions      what workers are told to load            modes         how they share the work, and who sleeps
    inflow        tokens from workers                      departures    workers that were given notice
    returns       samples that come back from workers      scope         what all of them share
    reattachment  samples whose workers come back          recovery      time until lost parts work again
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from actors.core.watch import Down, Gone
from actors.fleet.departures import Departures
from actors.fleet.dispatch import Dispatcher
from actors.fleet.enrolment import Enrolment
from actors.fleet.inflow import Inflow
from actors.fleet.length_ranking import LengthRanking, make_predictor
from actors.fleet.modes.make import MODES, make_mode
from actors.fleet.reattachment import EndOfGrace, Reattachment
from actors.fleet.recovery import Recoveries
from actors.fleet.returns import NoWord, Returns
from actors.fleet.scope import FleetOwner, JobScope
from actors.fleet.versions import Versions
from actors.fleet.workers import Worker
from actors.ledger.batch import StepBatch
from actors.ledger.report_check import ReportCheck
from actors.protocol.evaluations import is_evaluation
from actors.protocol.workers import WorkerAsleep, WorkerEnded, WorkerVersion


class Fleet:
    """A fleet builds and holds its parts. It is made after ``Opened``, once for each life of a job's scheduler.

    This class tells ``mode`` about workers; the scheduler's parts tell it about batches and the trainer.
    """

    def __init__(self, scope: JobScope, owner: FleetOwner, vocabulary: int = 0, route_bytes: int | None = None) -> None:
        """``vocabulary`` and ``route_bytes``: see ``ReportCheck``."""
        job, limits = scope.job, scope.limits
        self._scope = scope
        self.recoveries = Recoveries(scope.ledger)
        self.versions = Versions(scope, owner.held_back, self._may_load)
        newest_epoch_only = MODES[job.scheduling.policy].newest_epoch_only
        predictor = make_predictor(job.rollout.length_ranking, limits, newest_epoch_only=newest_epoch_only)
        self.ranking = LengthRanking(job.name, predictor)
        self.ranking.restore(scope.ledger)
        self.mode = make_mode(scope, self.versions, self.ranking)
        self._dispatcher = Dispatcher(scope, self.mode, self.ranking, self._kept_back)
        self.departures = Departures(scope)
        self._reattachment = Reattachment(scope.ledger_writer, job.staleness)
        self.returns = Returns(scope, self.mode, self.recoveries, owner)
        self.enrolment = Enrolment(
            scope, self.versions, self.mode, self.returns, self._reattachment, self.recoveries
        )  # fmt: skip
        check = ReportCheck(vocabulary, job.staleness, route_bytes)
        self.inflow = Inflow(scope, self.returns, check, self.enrolment.dismiss)
        if self._reattachment.awaited:
            scope.ctx.send_after(limits.reattach_s, EndOfGrace())

    def _may_load(self, worker: Worker) -> bool:
        return self.mode.may_load(worker)

    # ------------------------------------------------------------ who generates what

    def assign(self) -> None:
        """Hand out queued samples to workers that have room. Cheap if there is nothing to do."""
        scope, now = self._scope, self._scope.ctx.now()
        self.mode.look(now)
        if scope.ledger.paused:
            return
        if self._dispatcher.assign(now):
            for loss in self.recoveries.assigned(now):
                scope.event("samples_reassigned", worker=loss.part, samples=loss.samples, after_s=loss.after_s)
        self.mode.handed_out(now)

    def _kept_back(self, step: int) -> np.ndarray:
        return np.concatenate([self.returns.kept_back(step), self._reattachment.kept_back(step)])

    def tick(self, now: float) -> None:
        """Do everything that depends on time alone."""
        self.enrolment.end_lapsed(now)
        self.versions.tell_again(now)
        for name, numbers in self._dispatcher.overdue(now).items():
            worker = self._scope.workers.by_name[name]
            self.returns.revoke(worker, numbers, "it takes long to load the version that they need")

    # ------------------------------------------------------------ news from and about workers

    def serves(self, news: WorkerVersion) -> bool:
        """A worker has loaded a version; returns False if the worker is none of ours."""
        worker = self._scope.speaker(news.worker)
        if worker is None:
            return False
        worker.serves(news.policy_version)
        worker.heard_s = self._scope.ctx.now()
        self._scope.workers.loads.note(news)
        self.mode.served(worker, news)
        took = {"pull_s": round(news.pull_s, 4), "load_s": round(news.load_s, 4), "wire_bytes": news.wire_bytes}
        self._scope.record("worker_version", worker=worker.name, version=news.policy_version, **took)
        self.assign()
        return True

    def asleep(self, news: WorkerAsleep) -> bool:
        """A worker sleeps, or is awake, as it was told; returns False if the worker is none of ours."""
        worker = self._scope.speaker(news.worker)
        if worker is not None:
            self.mode.asleep(worker, news)
        return worker is not None

    def ended(self, news: WorkerEnded) -> None:
        """The machine of a worker says how its process ended."""
        if self.returns.ended(news):
            self._reattachment.release(news.worker)
            self.assign()

    def no_word(self, about: NoWord) -> None:
        """No news has come of how a worker ended: its samples are not kept back any longer."""
        if self.returns.no_word(about):
            self.assign()

    def end_of_grace(self) -> None:
        """The time for workers to come back is over: release the samples that were kept for them."""
        self._reattachment.release()
        self.assign()

    def down(self, news: Down) -> None:
        """A link has ended, perhaps that to a worker."""
        worker = self._scope.workers.at(news.address)
        if worker is not None:
            if news.reason is not Gone.STOPPED:
                self.recoveries.mark_crashed(worker.name)
            self.returns.down(worker, news)

    # ------------------------------------------------------------ what is learned of steps

    def committed(self, batch: StepBatch, trainer: Mapping[str, float], *, replay: bool) -> dict[str, float]:
        """Learn from a committed step and the ``trainer``'s metrics of it; returns columns for metrics.jsonl."""
        if replay:
            return self.recoveries.metrics()
        metrics = self.ranking.committed(batch)
        ranker, lesson = self._scope.services.get("ranker"), self.ranking.lesson(batch)
        if ranker is not None and lesson is not None:
            self._scope.tell(ranker, lesson)
        return metrics | self.recoveries.metrics() | self.mode.committed(batch, trainer)

    def ask_ranker(self, batches: Iterable[StepBatch]) -> None:
        """Ask the ranker how long the responses of these batches will be. Nothing waits for the answer."""
        if (ranker := self._scope.services.get("ranker")) is not None:
            open_steps = (batch for batch in batches if not batch.committed and not is_evaluation(batch.step))
            for question in (self.ranking.question(batch) for batch in open_steps):
                if question is not None:
                    self._scope.tell(ranker, question)
