"""The scheduler: one per job, in the head. It owns the ledger, and enters everything that happens to a sample.

      job ─IssueBatch──▶ ┐                        ┌─▶ Fleet ────────Assign────────▶ worker
   worker ─TokenReport─▶ │   LedgerWriter         │
  rewards ◀──Score─────▶ ├─▶ applies to ledger,  ─┼─▶ Scoring ──finished samples──▶ rewards
  trainer ─OpenStep────▶ │   appends to journal   ├─▶ Grants ───complete groups───▶ trainer
           CommitStep──▶ ┘                        └─▶ StepCommitted, NeedBatch ───▶ job

    who              waits for                           unblocked by
    queued sample    a ready worker with credit          WorkerVersion, TokenReport (ends), RegisterWorker, tick
    finished sample  a verdict                           Scored, RegisterService(rewards)
    scored group     its siblings, its step being open   Scored, Dropped, OpenStep
    CommitStep       the disk                            journal.durable
    next batch       the staleness bound                 Committed

This file is the actor: it passes each message to the part that it is for. The fleet (``actors/fleet``) owns the workers
and what they generate. The other parts, by what they own:

    steps      batches, commits, checkpoints, in order     scoring    questions to the reward worker
    grants     what the trainer has of its step            services   who serves in the other roles
    episodes   who drives each episode                     turns      the gateway's questions about episodes
    meter      the row of a step in metrics.jsonl          progress   how far the job is, and what it waits for

Invariants
- The ledger changes through ``LedgerWriter.apply`` only; handlers read facts from it and keep none of their own
  that a restart would miss.
- Commits and checkpoints are durable before anyone is told.
- Commands carry the term; reports of an older term or an older life of a worker never enter.
"""

from __future__ import annotations

from pathlib import Path

from actors.core.actor import Actor, Delivery, batched, concurrent, handles
from actors.core.message import Message, message
from actors.core.tenure import LeaseRenewed, RenewLease
from actors.core.watch import Down
from actors.fleet.departures import EndOfNotice
from actors.fleet.fleet import Fleet
from actors.fleet.reattachment import EndOfGrace
from actors.fleet.returns import NoWord
from actors.fleet.scope import JobScope, Rows
from actors.fleet.workers import WorkerTable
from actors.ledger import events as ev
from actors.ledger.journal import Journal, SqliteJournal
from actors.ledger.ledger import Counters, Ledger
from actors.ledger.ledger_writer import LedgerWriter
from actors.protocol import episodes as ep
from actors.protocol import workers as wk
from actors.protocol.batches import (
    BatchIssued,
    DataEnded,
    IssueBatch,
    Progress,
    QueryProgress,
    RequestCheckpoint,
    SetPaused,
)
from actors.protocol.evaluations import GiveUpEvaluation, is_evaluation
from actors.protocol.failures import Acknowledged
from actors.protocol.job_news import Trouble
from actors.protocol.lengths import LengthScores
from actors.protocol.services import LookupService, RegisterService, ServiceFound
from actors.protocol.steps import CheckpointTaken, CommitStep, Committed, OpenStep
from actors.protocol.tokens import TokenReport
from actors.protocol.weights import VersionAvailable
from actors.scheduler.episode_rows import EpisodeRows
from actors.scheduler.episodes import Episodes
from actors.scheduler.filtering import SpreadFilter
from actors.scheduler.grants import Grants
from actors.scheduler.meter import StepMeter
from actors.scheduler.progress import ProgressReport
from actors.scheduler.scoring import Scoring, restored
from actors.scheduler.services import Services
from actors.scheduler.steps import Steps
from actors.scheduler.turns import Turns
from configs.run_files import JOURNAL
from configs.schema import JobConfig
from transport.address import ActorAddress, PeerId


@message("scheduler.tick")
class Tick(Message):
    """The scheduler's message to itself to check what no other message reports, such as the time."""


class Scheduler(Actor):
    """Runs one job. ``journal``: used instead of ``run_dir/journal.db`` (tests, simulations)."""

    def __init__(
        self,
        job: JobConfig,
        run_dir: Path,
        journal: Journal | None = None,
        metrics: ActorAddress | None = None,
        *,
        resumed: bool = False,
        vocabulary: int = 0,
        route_bytes: int | None = None,
    ) -> None:
        """``resumed``: the run was ended before and goes on now, so its operator's former request to stop is void.
        ``vocabulary``: number of token ids that the model has; 0: not known. ``route_bytes``: bytes of a token's
        experts, None: not known.
        """
        self._vocabulary, self._route_bytes = vocabulary, route_bytes
        self._job = job
        self._resumed = resumed
        self._run_dir = run_dir
        self._given_journal = journal
        self._metrics = metrics
        self._workers = WorkerTable()
        self._ledger = Ledger()
        self._services: dict[str, ActorAddress] = {}
        self.begun = False
        """Whether the journal is read, this term's opening is durable, and the parts are made."""

    # ------------------------------------------------------------ life

    async def on_start(self) -> None:
        journal = self._given_journal
        if journal is None:
            path = self._run_dir / JOURNAL
            journal = await self.ctx.run_blocking(SqliteJournal, path, self._job.name, self._job.limits)
        floor, events = await self.ctx.run_blocking(journal.read)
        self._journal = journal
        self._ledger = ledger = Ledger(floor)
        ledger.restore(events)
        self._ledger_writer = LedgerWriter(ledger, journal)
        taken_over_s = self.ctx.now() if ledger.term else None
        self._ledger_writer.apply(ev.Opened(ledger.term + 1))
        if self._resumed and (ledger.stopping or ledger.ended):
            self._ledger_writer.apply(ev.Stopping(False))
        await journal.durable()
        self._make_parts()
        if taken_over_s is not None:
            self._fleet.recoveries.lost("head", taken_over_s)
        self._scoring.add(restored(self._ledger_writer))
        self._scope.event("scheduler_opened", term=ledger.term, committed_steps=ledger.committed_steps)
        self.ctx.send_after(self._job.limits.scheduler_tick_s, Tick())

    def _make_parts(self) -> None:
        ctx, job, ledger_writer = self.ctx, self._job, self._ledger_writer
        self._scope = scope = JobScope(
            ctx, job, ledger_writer, self._workers, self._services, self._metrics, self.assign
        )
        self._meter = StepMeter(self._ledger, self._workers, ctx.now(), self._job)
        self._scoring = Scoring(scope, self.settled)
        self._fleet = fleet = Fleet(scope, self, self._vocabulary, self._route_bytes)
        spread = SpreadFilter(scope) if job.algorithm.filter == "spread" else None
        self._grants = Grants(scope, fleet, spread)
        self._episode_rows = rows = EpisodeRows(scope, fleet)
        self._turns, self._episodes = Turns(scope, rows), Episodes(scope, fleet, rows, self.settled)
        self._steps = Steps(scope, fleet, self._grants, self._meter, self._episodes, spread)
        self._registry = Services(scope, fleet, self._scoring, self._grants, self._steps)
        self._progress = ProgressReport(scope, fleet, self._grants, self._steps)
        self.begun = True

    async def on_stop(self) -> None:
        await self._journal.close()

    @handles(Tick)
    async def tick(self, _: Tick) -> None:
        """Retry sends that were refused for lack of room, and do what depends on time alone."""
        self.ctx.send_after(self._job.limits.scheduler_tick_s, Tick())
        self._progress.look()
        self._fleet.tick(self.ctx.now())
        self._episodes.tick(self.ctx.now())
        self._steps.look(self.ctx.now(), self._progress.reason)
        self.need_batch()
        self.assign()
        self.grant()
        self._scoring.pump()

    # ------------------------------------------------------------ the flow

    def assign(self) -> None:
        self._fleet.assign()
        self._episodes.pump()

    def grant(self) -> None:
        """Send the trainer the groups that are complete."""
        self._grants.pump()
        if self._grants.all_sent:
            self._meter.cut()
            self.need_batch()
            self._fleet.versions.secure(self._grants.step)

    def need_batch(self) -> None:
        """Ask the job for the next batch, if one may be issued."""
        self._steps.need_batch()

    # ------------------------------------------------------------ as the owner of its fleet

    def finished(self, rows: Rows) -> None:
        self._scoring.finished(rows)

    def turns_over(self, rows: Rows) -> None:
        self._episode_rows.turns_over(rows)

    def settled(self, step: int) -> None:
        self._episodes.dropped(step)
        if is_evaluation(step):
            self._steps.evaluations.settled(step)
        elif step == self._grants.step:
            self.grant()

    def held_back(self) -> int | None:
        return self._steps.evaluations.held_back()

    # ------------------------------------------------------------ job

    @handles(IssueBatch)
    async def issue_batch(self, batch: IssueBatch) -> BatchIssued:
        if self._steps.issue(batch):
            if not is_evaluation(batch.step):
                self._fleet.mode.issued(batch)
                self._fleet.ask_ranker([self._ledger.batches[batch.step]])
            self.assign()
            self.grant()
            self.need_batch()
        return BatchIssued(job=self._job.name, step=batch.step)

    @handles(DataEnded)
    async def data_ended(self, news: DataEnded) -> Acknowledged:
        self._steps.data_ended(news.step, news.failed)
        self.grant()
        return Acknowledged()

    @handles(GiveUpEvaluation)
    async def give_up_evaluation(self, news: GiveUpEvaluation) -> Acknowledged:
        self._steps.evaluations.give_up(news.version, news.why)
        return Acknowledged()

    @handles(SetPaused)
    async def set_paused(self, order: SetPaused) -> Acknowledged:
        self._ledger_writer.apply(ev.Paused(order.paused))
        await self._journal.durable()
        self.assign()
        return Acknowledged()

    @handles(RequestCheckpoint)
    async def request_checkpoint(self, order: RequestCheckpoint) -> Acknowledged:
        if order.stop:
            self._ledger_writer.apply(ev.Stopping(True))
            if self._ledger.paused:  # the step under way has to end before there can be a checkpoint
                self._ledger_writer.apply(ev.Paused(False))
            await self._journal.durable()
            self.assign()
        self._steps.request_checkpoint()
        return Acknowledged()

    @handles(Trouble)
    async def trouble(self, news: Trouble) -> None:
        self._scope.check_job(news.job)
        self._scope.pass_on(news)

    @handles(QueryProgress)
    async def progress(self, _: QueryProgress) -> Progress:
        return self._progress.make()

    # ------------------------------------------------------------ workers

    @handles(wk.RegisterWorker)
    async def register_worker(self, offer: wk.RegisterWorker) -> wk.Registered:
        self._scope.check_job(offer.job)
        return self._fleet.enrolment.register(offer)

    @handles(RenewLease)
    async def renew_lease(self, question: RenewLease) -> LeaseRenewed:
        return self._episodes.renew(question) or self._fleet.enrolment.renew(question)

    @handles(wk.WorkerVersion)
    async def worker_version(self, news: wk.WorkerVersion) -> None:
        if self._fleet.serves(news):
            self.grant()

    @handles(wk.WorkerAsleep)
    async def worker_asleep(self, news: wk.WorkerAsleep) -> None:
        if self._fleet.asleep(news):
            self.grant()

    @handles(TokenReport)
    @batched
    async def token_report(self, batch: list[Delivery]) -> None:
        await self._fleet.inflow.take_in_portions(batch)

    @handles(wk.AssignmentsFailed)
    async def assignments_failed(self, news: wk.AssignmentsFailed) -> None:
        self._fleet.returns.failed(news)

    @handles(wk.Draining)
    async def draining(self, news: wk.Draining) -> None:
        self._fleet.departures.noticed(news)

    @handles(EndOfNotice)
    async def end_of_notice(self, about: EndOfNotice) -> None:
        self._fleet.departures.end_of_notice(about)

    @handles(wk.Leaving)
    async def leaving(self, news: wk.Leaving) -> None:
        self._fleet.enrolment.leave(news)

    @handles(NoWord)
    async def no_word(self, about: NoWord) -> None:
        self._fleet.no_word(about)

    @handles(wk.WorkerEnded)
    async def worker_ended(self, news: wk.WorkerEnded) -> None:
        self._fleet.ended(news)

    @handles(EndOfGrace)
    async def end_of_grace(self, _: EndOfGrace) -> None:
        self._fleet.end_of_grace()

    # ------------------------------------------------------------ services

    @handles(RegisterService)
    async def register_service(self, offer: RegisterService) -> Acknowledged:
        self._scope.check_job(offer.job)
        self._registry.register(offer, self.ctx.sender_process)
        if offer.moved:
            await self._episodes.gateway_moved()
        return Acknowledged()

    @handles(LookupService)
    async def lookup_service(self, question: LookupService) -> ServiceFound:
        version = self._fleet.versions.newest if question.role == "weights" else -1
        return ServiceFound(address=self._services.get(question.role), policy_version=version)

    @handles(VersionAvailable)
    async def version_available(self, news: VersionAvailable) -> None:
        self._fleet.versions.offer(news)
        self._steps.evaluations.look()

    @handles(LengthScores)
    async def length_scores(self, news: LengthScores) -> None:
        self._fleet.ranking.scored(news)

    @handles(Down)
    async def down(self, news: Down) -> None:
        self._fleet.down(news)
        self._episodes.down(news)
        self._registry.down(news)

    # ------------------------------------------------------------ episodes

    @handles(ep.RegisterEnvironment)
    async def register_environment(self, offer: ep.RegisterEnvironment) -> ep.EnvironmentRegistered:
        return self._episodes.register(offer)

    @handles(ep.LeaseEpisode)
    @concurrent
    async def lease_episode(self, question: ep.LeaseEpisode) -> ep.EpisodeLeased:
        return await self._episodes.lease(question)

    @handles(ep.EpisodeEnded)
    @concurrent
    async def episode_ended(self, news: ep.EpisodeEnded) -> Acknowledged:
        await self._episodes.ended(news)
        return Acknowledged()

    @handles(ep.GetEpisode)
    async def get_episode(self, question: ep.GetEpisode) -> ep.EpisodeRecord:
        return self._turns.record(question, self._episodes.left_s(question.episode))

    @handles(ep.TakeTurn)
    @concurrent
    async def take_turn(self, ask: ep.TakeTurn) -> ep.TurnTaken:
        return await self._turns.take(ask)

    @handles(ep.CutTurn)
    @concurrent
    async def cut_turn(self, order: ep.CutTurn) -> Acknowledged:
        await self._turns.cut(order)
        return Acknowledged()

    # ------------------------------------------------------------ trainer

    @handles(OpenStep)
    async def open_step(self, order: OpenStep) -> Acknowledged:
        self._scope.check_job(order.job)
        await self._steps.open(order)
        self.grant()
        return Acknowledged()

    @handles(CommitStep)
    @concurrent
    async def commit_step(self, commit: CommitStep) -> Committed:
        self._scope.check_job(commit.job)
        return await self._steps.commit(commit)

    @handles(CheckpointTaken)
    @concurrent
    async def checkpoint_taken(self, news: CheckpointTaken) -> Acknowledged:
        await self._steps.checkpoint_taken(news)
        return Acknowledged()

    # ------------------------------------------------------------ views for tests and the head

    def credit(self) -> list[tuple[str, PeerId, int, int]]:
        """(worker, its process, its samples by the worker table, and by the ledger); both numbers are always equal."""
        workers = self._workers.by_name.values()
        return [(w.name, w.address.peer, w.in_flight, len(self._ledger.in_flight(w.name))) for w in workers]

    def leases(self) -> list[tuple[PeerId, float]]:
        """(a worker's process, the loop time at which its lease ends unless it is renewed), for all workers."""
        workers = [(w.address.peer, w.lease.expires_s) for w in self._workers.by_name.values() if w.lease is not None]
        return workers + (self._episodes.leases() if self.begun else [])

    def progress_now(self) -> Progress | None:
        """The answer to QueryProgress, without waiting in the mailbox behind tokens; None until the journal is read."""
        return self._progress.make() if self.begun else None

    @property
    def counters(self) -> Counters:
        return self._ledger.counters
