"""The scheduler: one per job, in the head. It owns the ledger, and everything that happens to a sample passes it.

      job ─IssueBatch─▶ ┐                    ┌─▶ Dispatcher ─Assign─▶ worker
   worker ─TokenDelta─▶ │  Books             │
  rewards ◀──Score────▶ ├─▶ apply to ledger ─┼─▶ Scoring ──finished samples──▶ rewards
  trainer ─OpenStep───▶ │   append to journal├─▶ Leases ───complete groups───▶ trainer
           CommitStep─▶ ┘                    └─▶ StepCommitted, NeedBatch ───▶ job

    who              waits for                           unblocked by
    queued sample    a ready worker with credit          WorkerVersion, TokenDelta (ends), RegisterWorker, tick
    finished sample  a verdict                           Scored, RegisterService(rewards)
    scored group     its siblings, its step being open   Scored, Dropped, OpenStep
    CommitStep       the disk                            journal.durable
    next batch       the staleness bound                 Committed

This file is the actor: what it hears, and which of its parts that is for. The parts, by what they own:

    enrolment   who is a worker, and its lease           services   who serves in the other roles
    dispatch    who generates what                       steps      batches, commits, checkpoints, in order
    balancing   samples that are better off elsewhere    leases     what the trainer has of its step
    departures  workers that were given notice           versions   what workers are told to load
    returns     samples that come back from workers
    inflow      tokens from workers                      progress   how far it is, and whom it waits for
    scoring     questions to the reward worker           seeding    when the trainer's machine generates, and when not
    reattachment, unexplained, recovery: what is known of lives that have ended        job_scope: what they share

Invariants
- The ledger changes through ``Books.apply`` only; handlers read facts from it and keep none of their own that a
  restart would miss.
- Commits and checkpoints are durable before anyone is told.
- Commands carry the epoch; deltas of an older epoch or an older life of a worker never enter.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from actors.core.actor import Actor, batched, concurrent, handles, idempotent
from actors.core.kernel.delivery import Delivery
from actors.core.message import Message, message
from actors.core.tenure import LeaseRenewed, RenewLease
from actors.core.watch import Down, Gone
from actors.fleet.balancing import Balancing
from actors.fleet.departures import Departures, EndOfNotice
from actors.fleet.dispatch import Dispatcher
from actors.fleet.enrolment import Enrolment
from actors.fleet.inflow import Inflow
from actors.fleet.length_ranking import LengthRanking, make_predictor
from actors.fleet.long_lanes import LongLanes
from actors.fleet.reattachment import Reattachment
from actors.fleet.recovery import Recoveries
from actors.fleet.returns import NoWord, Returns
from actors.fleet.scope import JobScope
from actors.fleet.seeding import Seeding
from actors.fleet.seeding_estimate import SeedingEstimate
from actors.fleet.versions import Versions
from actors.fleet.workers import WorkerTable
from actors.ledger import events as ev
from actors.ledger.books import Books
from actors.ledger.journal import Journal, SqliteJournal
from actors.ledger.ledger import Counters, Ledger
from actors.protocol.batches import (
    BatchIssued,
    DataEnded,
    IssueBatch,
    Progress,
    QueryProgress,
    RequestCheckpoint,
    SetPaused,
)
from actors.protocol.failures import Acknowledged
from actors.protocol.lengths import LengthScores
from actors.protocol.services import LookupService, RegisterService, ServiceFound
from actors.protocol.steps import CheckpointTaken, CommitStep, Committed, OpenStep
from actors.protocol.tokens import TokenDelta
from actors.protocol.weights_news import VersionAvailable
from actors.protocol.workers import (
    AssignmentsFailed,
    Draining,
    Leaving,
    Registered,
    RegisterWorker,
    WorkerAsleep,
    WorkerEnded,
    WorkerVersion,
)
from actors.scheduler.leases import Leases
from actors.scheduler.meter import StepMeter
from actors.scheduler.progress import ProgressReport
from actors.scheduler.scoring import Scoring, restored
from actors.scheduler.services import Services
from actors.scheduler.steps import Steps
from configs.schema import JobConfig
from transport.address import ActorAddress, PeerId


@message("scheduler.tick")
class Tick(Message):
    """To oneself: look for what no message will tell."""


@message("scheduler.end_of_grace")
class EndOfGrace(Message):
    """To oneself: whoever went on while there was no scheduler has had the time to come back."""


class Scheduler(Actor):
    """``journal``: a ready-made one (tests, simulations) instead of ``run_dir/journal.db``."""

    def __init__(
        self,
        job: JobConfig,
        run_dir: Path,
        journal: Journal | None = None,
        metrics: ActorAddress | None = None,
        *,
        resumed: bool = False,
    ) -> None:
        """``resumed``: of a run that was ended before: what its operator wanted then is void."""
        self._job = job
        self._resumed = resumed
        self._run_dir = run_dir
        self._given_journal = journal
        self._metrics = metrics
        self._workers = WorkerTable()
        self._ledger = Ledger()
        self._services: dict[str, ActorAddress] = {}
        self.begun = False
        """What it has begun with is durable."""

    # ------------------------------------------------------------ life

    async def on_start(self) -> None:
        journal = self._given_journal
        if journal is None:
            path = self._run_dir / "journal.db"
            journal = await self.ctx.run_blocking(SqliteJournal, path, self._job.name, self._job.limits)
        floor, events = await self.ctx.run_blocking(journal.read)
        self._journal = journal
        self._ledger = ledger = Ledger(floor)
        ledger.restore(events)
        self._books = Books(ledger, journal)
        self._recoveries = Recoveries(ledger)
        if ledger.epoch:
            self._recoveries.lost("head", self.ctx.now())
        self._books.apply(ev.Opened(ledger.epoch + 1))
        if self._resumed and (ledger.stopping or ledger.ended):
            self._books.apply(ev.Stopping(False))
        await journal.durable()
        self._make_parts(journal)
        self._scoring.add(restored(self._books))
        self._scope.event("scheduler_opened", epoch=ledger.epoch, committed_steps=ledger.committed_steps)
        self.ctx.send_after(self._job.limits.scheduler_tick_s, Tick())
        if self._reattachment.awaited:
            self.ctx.send_after(self._job.limits.reattach_s, EndOfGrace())

    def _make_parts(self, journal: Journal) -> None:
        job, ledger, books, limits = self._job, self._ledger, self._books, self._job.limits
        self._scope = scope = JobScope(self.ctx, job, books, self._workers, self._services, self._metrics, self)
        self._meter = StepMeter(ledger, self._workers, self.ctx.now())
        self._versions = Versions(scope, journal)
        self._leases = Leases(job.name, books, scope.tell, self._versions.may_begin, early=job.scores_early)
        self._ranking = LengthRanking(job.name, make_predictor(job.rollout.length_ranking, limits))
        self._ranking.restore(ledger)
        lanes = LongLanes(dedicates=job.rollout.dedicated_workers != "none")
        balanced = job.scheduling.policy == "rlboost"
        self._dispatcher = Dispatcher(
            job.name, books, self._workers, job.staleness, limits, scope.tell, self._ranking,
            one_step=job.sync.mode == "one_step_barrier",
            lanes=lanes,
            pending_max=limits.pending_samples_max if balanced else None,
        )  # fmt: skip
        self._balancing = Balancing(scope, lanes, relief=job.scheduling.relief) if balanced else None
        estimated = job.scheduling.seeding_end == "estimated"
        look_s, ahead = limits.seeding_look_s, job.staleness
        estimate = SeedingEstimate(ledger, self._ranking, look_s, max_staleness=ahead) if estimated else None
        self._seeding = Seeding(scope, self._versions, estimate) if job.scheduling.seeding else None
        if self._seeding is not None:
            self._leases.held = self._seeding.holds
            self._leases.opened, self._leases.given = self._seeding.trainer_opened, self._seeding.trainer_given
        self._departures = Departures(scope)
        self._scoring = Scoring(self.ctx, job, books, self._on_settled)
        self._reattachment = Reattachment(books, job.staleness)
        self._returns = Returns(scope, self._scoring, self._recoveries, self._on_settled)
        self._enrolment = Enrolment(scope, self._versions, self._returns, self._reattachment, self._meter)
        self._steps = Steps(
            scope, journal, self._leases, self._versions, self._meter, self._recoveries, self._ranking, self._seeding
        )
        self._inflow = Inflow(scope, self._returns, self._steps)
        self._registry = Services(
            scope, self._scoring, self._steps, self._leases, self._versions, self._enrolment, self._recoveries,
            self._ranking,
        )  # fmt: skip
        self._progress = ProgressReport(scope, self._steps, self._leases, self._versions)
        self._dispatcher.kept_back = self._kept_back
        self.begun = True

    async def on_stop(self) -> None:
        await self._journal.close()

    @handles(Tick)
    async def tick(self, _: Tick) -> None:
        """Retry what was refused for lack of room, and what depends on time alone."""
        now = self.ctx.now()
        self.ctx.send_after(self._job.limits.scheduler_tick_s, Tick())
        self._progress.look()
        self._enrolment.end_lapsed(now)
        self._versions.tell_again(now)
        for name, numbers in self._dispatcher.overdue(now).items():
            worker = self._workers.by_name[name]
            self._returns.revoke(worker, numbers, "it takes long to load the version that they need")
        self.need_batch()
        self.assign()
        self.lease()
        self._scoring.pump()

    @handles(EndOfGrace)
    async def end_of_grace(self, _: EndOfGrace) -> None:
        """Who has not come back by now goes on with nothing."""
        self._reattachment.release()
        self.assign()

    # ------------------------------------------------------------ the flow

    def assign(self) -> None:
        now = self.ctx.now()
        if self._seeding is not None:
            self._seeding.look(now)
        if not self._ledger.paused and self._dispatcher.assign(now):
            for loss in self._recoveries.assigned(now):
                self._scope.event("samples_reassigned", worker=loss.part, samples=loss.samples, after_s=loss.after_s)
        if self._balancing is not None and not self._ledger.paused:
            self._balancing.look(now)

    def lease(self) -> None:
        self._leases.pump()
        if self._leases.all_sent:
            self._meter.cut()
            self.need_batch()
            self._versions.secure(self._leases.step)

    def need_batch(self) -> None:
        self._steps.need_batch()

    def _kept_back(self, step: int) -> np.ndarray:
        return np.concatenate([self._returns.kept_back(step), self._reattachment.kept_back(step)])

    def _on_settled(self, step: int) -> None:
        if step == self._leases.step:
            self.lease()

    # ------------------------------------------------------------ job

    @handles(IssueBatch)
    @idempotent
    async def issue_batch(self, batch: IssueBatch) -> BatchIssued:
        if self._steps.issue(batch):
            self._registry.ask_ranker([self._ledger.batches[batch.step]])
            self.assign()
            self.lease()
            self.need_batch()
        return BatchIssued(job=self._job.name, step=batch.step)

    @handles(DataEnded)
    async def data_ended(self, news: DataEnded) -> Acknowledged:
        self._steps.data_ended(news.step)
        return Acknowledged()

    @handles(SetPaused)
    async def set_paused(self, order: SetPaused) -> Acknowledged:
        self._books.apply(ev.Paused(order.paused))
        await self._journal.durable()
        self.assign()
        return Acknowledged()

    @handles(RequestCheckpoint)
    async def request_checkpoint(self, order: RequestCheckpoint) -> Acknowledged:
        if order.stop:
            self._books.apply(ev.Stopping(True))
            if self._ledger.paused:  # the step under way has to end before there can be a checkpoint
                self._books.apply(ev.Paused(False))
            await self._journal.durable()
            self.assign()
        self._steps.request_checkpoint()
        return Acknowledged()

    @handles(QueryProgress)
    async def progress(self, _: QueryProgress) -> Progress:
        return self._progress.make()

    # ------------------------------------------------------------ workers

    @handles(RegisterWorker)
    async def register_worker(self, offer: RegisterWorker) -> Registered:
        self._scope.check_job(offer.job)
        return self._enrolment.register(offer)

    @handles(RenewLease)
    async def renew_lease(self, question: RenewLease) -> LeaseRenewed:
        return self._enrolment.renew(question)

    @handles(WorkerVersion)
    async def worker_version(self, news: WorkerVersion) -> None:
        worker = self._scope.speaker(news.worker)
        if worker is not None:
            worker.serves(news.policy_version)
            worker.heard_s = self.ctx.now()
            self._meter.loads.note(news)
            took = {"pull_s": round(news.pull_s, 4), "load_s": round(news.load_s, 4)}
            self._scope.record("worker_version", worker=worker.name, version=news.policy_version, **took)
            self.assign()
            self.lease()

    @handles(WorkerAsleep)
    async def worker_asleep(self, news: WorkerAsleep) -> None:
        worker = self._scope.speaker(news.worker)
        if worker is not None and self._seeding is not None:
            self._seeding.heard(worker, news)
            self.lease()

    @handles(TokenDelta)
    @batched
    async def token_delta(self, batch: list[Delivery]) -> None:
        for number, turn in enumerate(self._inflow.turns(batch)):
            if number:
                await asyncio.sleep(0)
            await self._journal.room()
            self._inflow.take(turn)

    @handles(AssignmentsFailed)
    async def assignments_failed(self, news: AssignmentsFailed) -> None:
        if (worker := self._scope.speaker(news.worker)) is not None:
            self._returns.failed(worker, news)

    @handles(Draining)
    async def draining(self, news: Draining) -> None:
        if (worker := self._scope.speaker(news.worker)) is not None:
            self._departures.noticed(worker, news)

    @handles(EndOfNotice)
    async def end_of_notice(self, about: EndOfNotice) -> None:
        self._departures.end_of_notice(about)

    @handles(Leaving)
    async def leaving(self, news: Leaving) -> None:
        if (worker := self._scope.speaker(news.worker)) is not None:
            self._enrolment.leave(worker, news.reason)

    @handles(NoWord)
    async def no_word(self, about: NoWord) -> None:
        if self._returns.no_word(about):
            self.assign()

    @handles(WorkerEnded)
    async def worker_ended(self, news: WorkerEnded) -> None:
        if self._returns.ended(news):
            self._reattachment.release(news.worker)
            self.assign()

    # ------------------------------------------------------------ services

    @handles(RegisterService)
    async def register_service(self, offer: RegisterService) -> Acknowledged:
        self._scope.check_job(offer.job)
        self._registry.register(offer)
        return Acknowledged()

    @handles(LookupService)
    async def lookup_service(self, question: LookupService) -> ServiceFound:
        return ServiceFound(address=self._services.get(question.role))

    @handles(VersionAvailable)
    async def version_available(self, news: VersionAvailable) -> None:
        self._versions.offer(news)

    @handles(LengthScores)
    async def length_scores(self, news: LengthScores) -> None:
        self._ranking.scored(news)

    @handles(Down)
    async def down(self, news: Down) -> None:
        worker = self._workers.at(news.address)
        if worker is not None:
            if news.reason is not Gone.STOPPED:
                self._enrolment.mark_crashed(worker.name)
            self._returns.down(worker, news)
        self._registry.down(news)

    # ------------------------------------------------------------ trainer

    @handles(OpenStep)
    async def open_step(self, order: OpenStep) -> Acknowledged:
        self._scope.check_job(order.job)
        await self._steps.open(order)
        return Acknowledged()

    @handles(CommitStep)
    @concurrent
    @idempotent
    async def commit_step(self, commit: CommitStep) -> Committed:
        self._scope.check_job(commit.job)
        return await self._steps.commit(commit)

    @handles(CheckpointTaken)
    @concurrent
    async def checkpoint_taken(self, news: CheckpointTaken) -> Acknowledged:
        await self._steps.checkpoint_taken(news)
        return Acknowledged()

    # ------------------------------------------------------------ for those who look from outside

    def credit(self) -> list[tuple[str, PeerId, int, int]]:
        """Worker, its process, samples that it is counted with, and that the ledger says it holds: always equal."""
        workers = self._workers.by_name.values()
        return [(w.name, w.address.peer, w.in_flight, len(self._ledger.in_flight(w.name))) for w in workers]

    def leases(self) -> list[tuple[PeerId, float]]:
        """Each worker's process, and the loop time at which its lease ends unless it is renewed."""
        return [(w.address.peer, w.lease.expires_s) for w in self._workers.by_name.values() if w.lease is not None]

    def progress_now(self) -> Progress | None:
        """What QueryProgress is answered, without waiting for a turn behind tokens; None until the journal is read."""
        return self._progress.make() if self.begun else None

    @property
    def counters(self) -> Counters:
        """The ledger's."""
        return self._ledger.counters
