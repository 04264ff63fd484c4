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

Invariants
- The ledger changes through ``Books.apply`` only; handlers read facts from it and keep none of their own that a
  restart would miss.
- Commits and checkpoints are durable before anyone is told.
- Commands carry the epoch; deltas of an older epoch or an older life of a worker are counted and never enter.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import numpy as np

from actors.core.actor import Actor, concurrent, handles, idempotent
from actors.core.message import Message, message
from actors.core.tenure import LeaseRenewed, RenewLease
from actors.core.watch import Down, Gone
from actors.metrics.messages import Event
from actors.ranker.messages import LengthScores
from actors.rollout.messages import Drain, PullVersion, Revoke
from actors.scheduler import events as ev
from actors.scheduler import messages as m
from actors.scheduler.batch import SampleState, StepBatch
from actors.scheduler.books import Books
from actors.scheduler.dispatch import Dispatcher
from actors.scheduler.errors import IllegalTransition, NotAccepted
from actors.scheduler.journal import Journal, SqliteJournal
from actors.scheduler.leases import Leases, newest_whole_step, whole
from actors.scheduler.ledger import Counters, Ledger, Outcome
from actors.scheduler.length_ranking import LengthRanking, make_predictor
from actors.scheduler.long_lanes import LongLanes
from actors.scheduler.meter import StepMeter
from actors.scheduler.reattachment import Reattachment, TakenUp
from actors.scheduler.recovery import Recoveries
from actors.scheduler.scoring import Scoring, restored
from actors.scheduler.stall import StallView, waiting_for
from actors.scheduler.unexplained import Rows, Unexplained
from actors.scheduler.workers import Worker, WorkerTable
from configs.schema import JobConfig
from transport.address import ActorAddress, PeerId
from transport.transport import SendOutcome

_LEASE_BITS: Final = 32
"""Leases of a later life of the scheduler have higher numbers than all of this one."""


@message("scheduler.tick")
class Tick(Message):
    """To oneself: look for what no message will tell."""


@message("scheduler.no_word")
class NoWord(Message):
    """To oneself: nobody has said in time how that life of a worker ended."""

    incarnation: int


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
    ) -> None:
        self._job = job
        self._steps = job.steps
        """Fewer than the job says once its data has ended."""
        self._run_dir = run_dir
        self._given_journal = journal
        self._metrics = metrics
        self._workers = WorkerTable()
        self._ledger = Ledger()
        self._services: dict[str, ActorAddress] = {}
        self._crashed: set[str] = set()
        """Names whose last life ended badly; their next one is a restart."""
        self._newest_version = -1
        """That workers are told of: the newest that is offered, but never one of samples that a crash could take."""
        self._offered_version = -1
        self._weights: ActorAddress | None = None
        self._secured_step = -1
        """All samples of this step and those before it are on disk; version s + 1 is made of those of step s."""
        self._stop_requested = False
        self._checkpoint_requested = False
        self._committing = asyncio.Lock()
        self._next_known = asyncio.Event()
        """Set when a batch is issued, or when it is known that none will be."""
        self._asked_batch = (-1, 0.0)
        self._moved = (-1, 0.0)
        self._securing_step = -1
        self._told_step = -1
        """The newest committed step whose row this life has told the job."""
        self._untold: list[m.StepCommitted] = []
        """What the job is told as soon as it has registered."""
        self._prompt_tokens = 0.0
        """Mean length of the prompts of the batch that was issued last."""
        self.stale_deltas = 0
        self.refused_deltas = 0

    # ------------------------------------------------------------ life

    async def on_start(self) -> None:
        journal = self._given_journal
        if journal is None:
            path = self._run_dir / "journal.db"
            journal = await self.ctx.run_blocking(SqliteJournal, path, self._job.name, self.ctx.limits)
        floor, events = await self.ctx.run_blocking(journal.read)
        self._ledger = Ledger(floor)
        self._ledger.restore(events)
        self._books = Books(self._ledger, journal)
        self._journal = journal
        self._meter = StepMeter(self._ledger, self._workers, self.ctx.now())
        self._recoveries = Recoveries(self._ledger)
        self._leases = Leases(self._job.name, self._books, self._tell, self._may_begin)
        predictor = make_predictor(self._job.rollout.length_ranking, self.ctx.limits)
        self._ranking = LengthRanking(self._job.name, predictor)
        self._ranking.restore(self._ledger)
        self._dispatcher = Dispatcher(
            self._job.name, self._books, self._workers, self._job.staleness, self.ctx.limits, self._tell, self._ranking,
            one_step=self._job.sync.mode == "one_step_barrier",
            lanes=LongLanes(self._job.rollout.dedicated_workers),
        )  # fmt: skip
        self._unexplained = Unexplained(self._ledger)
        self._scoring = Scoring(self.ctx, self._job.name, self._job.reward.timeout_s, self._books, self._on_settled)
        if self._ledger.epoch:
            self._recoveries.lost("head", self.ctx.now())
        self._books.apply(ev.Opened(self._ledger.epoch + 1))
        self._worker_leases = self._ledger.epoch << _LEASE_BITS
        self._reattachment = Reattachment(self._books, self._job.staleness)
        self._dispatcher.kept_back = self._kept_back
        await journal.durable()
        self._secured_step = newest_whole_step(self._ledger)
        self._scoring.add(restored(self._books))
        self._event("scheduler_opened", epoch=self._ledger.epoch, committed_steps=self._ledger.committed_steps)
        self.ctx.send_after(self.ctx.limits.scheduler_tick_s, Tick())
        if self._reattachment.awaited:
            self.ctx.send_after(self.ctx.limits.reattach_s, EndOfGrace())

    def _kept_back(self, step: int) -> np.ndarray:
        return np.concatenate([self._unexplained.kept_back(step), self._reattachment.kept_back(step)])

    @handles(EndOfGrace)
    async def end_of_grace(self, _: EndOfGrace) -> None:
        """Who has not come back by now goes on with nothing."""
        self._reattachment.release()
        self._assign()

    async def on_stop(self) -> None:
        await self._journal.close()

    @handles(Tick)
    async def tick(self, _: Tick) -> None:
        """Retry what was refused for lack of room, and what depends on time alone."""
        now = self.ctx.now()
        self.ctx.send_after(self.ctx.limits.scheduler_tick_s, Tick())
        if self._moved[0] != self._books.events:
            self._moved = (self._books.events, now)
        self._end_lapsed(now)
        for worker in self._workers.by_name.values():
            if now - worker.told_at_s > self.ctx.limits.pull_timeout_s:
                self._tell_to_pull(worker)
        for name, numbers in self._dispatcher.overdue(now).items():
            self._revoke(self._workers.by_name[name], numbers, "it takes long to load the version that they need")
        self._need_batch()
        self._assign()
        self._lease()
        self._scoring.pump()

    def _tell(self, address: ActorAddress, what: Message) -> SendOutcome:
        return self.ctx.ref(address).tell(what)

    def _event(self, name: str, **fields: float | str) -> None:
        self.ctx.log.info(name, **fields)
        self._record(name, **fields)

    def _record(self, name: str, **fields: float | str) -> None:
        """An event for checkers alone: it is in events.jsonl and not in the log."""
        if self._metrics is not None:
            self._tell(self._metrics, Event(job=self._job.name, name=name, fields=dict(fields)))

    # ------------------------------------------------------------ job

    @handles(m.IssueBatch)
    @idempotent
    async def issue_batch(self, batch: m.IssueBatch) -> m.BatchIssued:
        known = batch.step in self._ledger.batches or batch.step < self._ledger.committed_steps
        if not known:
            waited_for = self._ledger.issued_steps == self._ledger.committed_steps
            try:
                self._books.apply(_batch_event(batch))
            except IllegalTransition as error:
                raise NotAccepted(str(error)) from error
            if waited_for:
                self._meter.begin(self.ctx.now())
            self._next_known.set()
            self._prompt_tokens = sum(len(p.token_ids) for p in batch.prompts) / max(1, len(batch.prompts))
            self._ask_ranker([self._ledger.batches[batch.step]])
            self._assign()
            self._lease()
            self._need_batch()
        return m.BatchIssued(job=self._job.name, step=batch.step)

    def _ask_ranker(self, batches: list[StepBatch]) -> None:
        """How long the responses to these will be. Nobody waits for the answer."""
        if (ranker := self._services.get("ranker")) is not None:
            for question in (self._ranking.question(batch) for batch in batches if not batch.committed):
                if question is not None:
                    self._tell(ranker, question)

    @handles(LengthScores)
    async def length_scores(self, news: LengthScores) -> None:
        self._ranking.scored(news)

    def _need_batch(self) -> None:
        """Ask the job for the next batch: up to the staleness bound, and one step of look-ahead.

        A step that is with the trainer counts as done, so that prompts are read while it trains and not when it has
        committed, which is when everybody else has work.
        """
        job, step, now = self._services.get("job"), self._ledger.issued_steps, self.ctx.now()
        done = self._ledger.committed_steps + self._leases.all_sent
        last = min(done + self._job.staleness + 1, self._steps - 1)
        if job is None or step > last or self._stop_requested:
            return
        asked, at_s = self._asked_batch
        if step != asked or now - at_s > self.ctx.limits.ask_timeout_s:
            self._asked_batch = (step, now)
            self._tell(job, m.NeedBatch(job=self._job.name, step=step))

    @handles(m.DataEnded)
    async def data_ended(self, news: m.DataEnded) -> m.Acknowledged:
        self._steps = min(self._steps, news.step)
        self._next_known.set()
        return m.Acknowledged()

    @handles(m.SetPaused)
    async def set_paused(self, order: m.SetPaused) -> m.Acknowledged:
        self._books.apply(ev.Paused(order.paused))
        await self._journal.durable()
        self._assign()
        return m.Acknowledged()

    @handles(m.RequestCheckpoint)
    async def request_checkpoint(self, order: m.RequestCheckpoint) -> m.Acknowledged:
        self._checkpoint_requested = True
        self._stop_requested = self._stop_requested or order.stop
        self._next_known.set()
        return m.Acknowledged()

    @handles(m.QueryProgress)
    async def progress(self, _: m.QueryProgress) -> m.Progress:
        counters = self._ledger.counters
        return m.Progress(
            job=self._job.name,
            committed_steps=self._ledger.committed_steps,
            policy_version=self._newest_version,
            states=self._ledger.count_states(),
            workers={w.name: w.in_flight for w in self._workers.by_name.values()},
            prompts_lost=counters.prompts_lost,
            samples_trained_twice=counters.samples_trained_twice,
            samples_migrated=counters.samples_migrated,
            waiting_for=self._waiting_for(),
            paused=self._ledger.paused,
            quiet_s=self.ctx.now() - self._moved[1],
        )

    def credit(self) -> list[tuple[str, PeerId, int, int]]:
        """Worker, its process, samples that it is counted with, and that the ledger says it holds: always equal."""
        workers = self._workers.by_name.values()
        return [(w.name, w.address.peer, w.in_flight, len(self._ledger.in_flight(w.name))) for w in workers]

    @property
    def counters(self) -> Counters:
        """The ledger's, for those who look from outside."""
        return self._ledger.counters

    def _waiting_for(self) -> str:
        now, states, step = self.ctx.now(), self._ledger.count_states(), self._ledger.trainer_step
        if self._moved[0] != self._books.events:
            self._moved = (self._books.events, now)
        workers = self._workers.by_name.values()
        return waiting_for(
            StallView(
                quiet_s=now - self._moved[1],
                quiet_limit_s=self.ctx.limits.stall_report_s,
                paused=self._ledger.paused,
                step=step,
                steps=self._steps,
                issued=step in self._ledger.batches,
                queued=states["queued"],
                in_flight={w.name: w.in_flight for w in workers},
                finished=states["finished"],
                has_rewards="rewards" in self._services,
                has_prompts="prompts" in self._services,
                has_trainer=self._leases.trainer is not None,
                workers={w.name: w.policy_version for w in workers},
                needed_version=max(step - self._job.staleness, 0),
                newest_version=self._newest_version,
            )
        )

    # ------------------------------------------------------------ workers

    @handles(m.RegisterWorker)
    async def register_worker(self, offer: m.RegisterWorker) -> m.Registered:
        self._check_job(offer.job)
        now = self.ctx.now()
        before = self._workers.by_name.get(offer.worker.name)
        if before is not None:
            self._replace(before, offer)
        worker = self._workers.add(offer, now)
        self._count_restart(worker.name, again=before is not None and before.address.peer != worker.address.peer)
        self.ctx.watch(worker.address)
        worker.pulls(self._newest_version, now)
        self._worker_leases += 1
        worker.grant(self.ctx.limits.lease_s, self._worker_leases, now)
        self._event("worker_registered", worker=worker.name, node=worker.node, slots=worker.slots)
        taken = self._take_up(worker, offer)
        self._assign()
        return m.Registered(
            epoch=self._ledger.epoch,
            lease_s=self.ctx.limits.lease_s,
            lease=self._worker_leases,
            policy_version=self._newest_version,
            weights=self._weights,
            kept=np.array(taken.former, np.int64),
            numbers=np.array(taken.numbers, np.int64),
            lengths=np.array(taken.lengths, np.int32),
        )

    @handles(RenewLease)
    async def renew_lease(self, question: RenewLease) -> LeaseRenewed:
        if self._is_trainer(question.holder):
            return LeaseRenewed(lease=question.lease, lease_s=self.ctx.limits.lease_s)
        worker = self._speaker(question.holder)
        grant = None if worker is None else worker.renew(question.lease, self.ctx.now())
        if grant is None:
            raise NotAccepted(f"{question.holder} holds no such lease here: register anew")
        return LeaseRenewed(lease=grant.epoch, lease_s=grant.term_s)

    def _is_trainer(self, name: str) -> bool:
        """Whether whoever speaks is the trainer that serves now: it rules as long as no other one has registered."""
        trainer, sender = self._services.get("trainer"), self.ctx.sender
        return trainer is not None and sender is not None and (trainer.name, trainer.peer) == (name, sender.peer)

    def _end_lapsed(self, now: float) -> None:
        """Their links are up, and they have not been able to renew: what they hold goes on elsewhere."""
        for worker in [worker for worker in self._workers.by_name.values() if worker.has_lapsed(now)]:
            self._event("worker_lease_lapsed", worker=worker.name, node=worker.node)
            self.ctx.unwatch(worker.address)
            self._lose(worker, "its lease has lapsed")

    def leases(self) -> list[tuple[PeerId, float]]:
        """Each worker's process, and the loop time at which its lease ends unless it is renewed."""
        return [(w.address.peer, w.lease.expires_s) for w in self._workers.by_name.values() if w.lease is not None]

    def _take_up(self, worker: Worker, offer: m.RegisterWorker) -> TakenUp:
        """Let it go on with what it has generated while there was no scheduler; the rest is for everybody."""
        taken = self._reattachment.take_up(offer)
        self._reattachment.release(worker.name)
        if taken.numbers:
            worker.in_flight += len(taken.numbers)
            self._event("samples_taken_up", worker=worker.name, samples=len(taken.numbers), claimed=len(offer.holds))
        return taken

    def _replace(self, before: Worker, offer: m.RegisterWorker) -> None:
        """Raises:
        NotAccepted: ``before`` is what was started in the stead of this life, which had been given up.
        """
        other_life = before.address.peer != offer.worker.peer
        if other_life and offer.again and not before.again:
            self._event("worker_refused", worker=before.name, node=offer.node, why=f"replaced by {before.address}")
            raise NotAccepted(f"{before.address} has replaced {offer.worker}")
        if other_life:  # nobody would ever give it work again, so it must not believe that it is registered
            leave = Drain(job=offer.job, deadline_s=self.ctx.limits.stop_timeout_s, reason="replaced")
            self._tell(before.address, leave)
        self._lose(before, "it registered anew")
        self.ctx.unwatch(before.address)

    def _count_restart(self, name: str, *, again: bool) -> None:
        if again or name in self._crashed:
            self._crashed.discard(name)
            self._meter.restarts += 1

    @handles(m.WorkerVersion)
    async def worker_version(self, news: m.WorkerVersion) -> None:
        worker = self._speaker(news.worker)
        if worker is not None:
            worker.serves(news.policy_version)
            self._record("worker_version", worker=worker.name, version=news.policy_version)
            self._assign()
            self._lease()

    @handles(m.TokenDelta)
    async def token_delta(self, delta: m.TokenDelta) -> None:
        await self._journal.room()
        worker = self._speaker(delta.worker)
        if worker is None or delta.epoch != self._ledger.epoch:
            self.stale_deltas += 1
            return
        self._workers.heard(worker, delta.stats, self.ctx.now())
        event = ev.TokensAppended(
            worker.name, delta.policy_version, delta.assignments, delta.offsets, delta.counts, delta.finished,
            delta.tokens, delta.logprobs,
        )  # fmt: skip
        try:
            outcome = self._books.apply(event)
        except IllegalTransition as error:
            self.refused_deltas += 1
            self._event("delta_refused", worker=worker.name, why=str(error))
            self._revoke(worker, self._ledger.in_flight(worker.name), "its delta could not be read")
            return
        worker.latency.add(delta.stats.step_s, delta.offsets, delta.counts, self._prompt_tokens)
        self._after(worker, outcome)
        if len(outcome.broken):
            self._event("assignments_broken", worker=worker.name, samples=len(outcome.broken))
            self._revoke(worker, outcome.broken, "its tokens did not follow on")

    @handles(m.AssignmentsFailed)
    async def assignments_failed(self, news: m.AssignmentsFailed) -> None:
        worker = self._speaker(news.worker)
        if worker is None:
            return
        kind = news.failure.kind
        located = self._ledger.located(worker.name, news.assignments)
        self._event("assignments_failed", worker=worker.name, kind=kind, why=news.failure.message)
        if kind is m.FailureKind.INFRASTRUCTURE:
            worker.rest(self.ctx.now(), self.ctx.limits.backoff_first_s, self.ctx.limits.backoff_max_s)
        blame = kind in (m.FailureKind.DATA, m.FailureKind.BUG)
        outcome = self._books.apply(
            ev.Returned(worker.name, news.assignments, f"{kind}: {news.failure.message}", blame)
        )
        for step, rows in located.items():
            self._drop_hopeless(self._ledger.batches[step], rows, f"{kind}: {news.failure.message}")
        self._after(worker, outcome)

    @handles(m.Leaving)
    async def leaving(self, news: m.Leaving) -> None:
        worker = self._speaker(news.worker)
        if worker is not None:
            self._event("worker_leaving", worker=worker.name, why=news.reason)
            self.ctx.unwatch(worker.address)
            self._lose(worker, news.reason)

    def _speaker(self, name: str) -> Worker | None:
        """The worker of that name, unless the message comes from another life of it."""
        worker, sender = self._workers.by_name.get(name), self.ctx.sender
        if worker is None or (sender is not None and sender.peer != worker.address.peer):
            return None
        return worker

    def _after(self, worker: Worker, outcome: Outcome) -> None:
        """Carry on with what an event has set free."""
        worker.in_flight -= outcome.ended
        if outcome.finished:
            self._scoring.add(outcome.finished)
            self._scoring.pump_soon()
        for step, rows in outcome.queued.items():
            self._drop_hopeless(self._ledger.batches[step], rows, "it has moved too often")
        if outcome.ended:
            self._assign()

    def _revoke(self, worker: Worker, assignments: np.ndarray, why: str) -> None:
        """End these hand-outs here at once and there as soon as possible."""
        if len(assignments):
            self._tell(worker.address, Revoke(job=self._job.name, epoch=self._ledger.epoch, assignments=assignments))
            self._after(worker, self._books.apply(ev.Returned(worker.name, assignments, why)))

    def _lose(self, worker: Worker, why: str, *, crashed: bool = False) -> None:
        """A worker is gone: its samples go on elsewhere at once."""
        self._workers.by_name.pop(worker.name, None)
        numbers = self._ledger.in_flight(worker.name)
        if len(numbers):
            self._event("samples_returned", worker=worker.name, samples=len(numbers), why=why)
            outcome = self._books.apply(ev.Returned(worker.name, numbers, why, crashed=crashed))
            now = self.ctx.now()
            self._recoveries.lost_worker(worker.name, outcome.queued, silent_s=now - worker.heard_s, now=now)
            for step in outcome.queued:
                self._drop_poison(self._ledger.batches[step])
            self._after(worker, outcome)

    def _has_crashed(self, worker: Worker) -> bool:
        """What is known of one that cannot be reached; if that is nothing, its samples are kept back for a while."""
        incarnation = worker.address.peer.incarnation
        crashed = self._unexplained.end_of(incarnation)
        held = self._ledger.located(worker.name, self._ledger.in_flight(worker.name))
        if crashed is None and held:
            self._unexplained.add(incarnation, held)
            self.ctx.send_after(self.ctx.limits.end_news_s, NoWord(incarnation=incarnation))
        return bool(crashed)

    @handles(NoWord)
    async def no_word(self, about: NoWord) -> None:
        if self._unexplained.release(about.incarnation):
            self._assign()

    @handles(m.WorkerEnded)
    async def worker_ended(self, news: m.WorkerEnded) -> None:
        worker = self._workers.by_name.get(news.worker)
        if worker is not None and worker.address.peer.incarnation == news.incarnation:
            self._unexplained.note_end(news.incarnation, crashed=news.crashed)  # its Down is on its way
            return
        self._reattachment.release(news.worker)
        held = self._unexplained.explain(news.incarnation)
        if held and news.crashed:
            self._event("worker_crashed", worker=news.worker, detail=news.detail)
            self._isolate(news.worker, held)
        self._assign()

    def _isolate(self, name: str, held: Rows) -> None:
        """These were with an engine when it crashed. Those that have gone on elsewhere meanwhile are taken back."""
        steps = np.concatenate([np.full(len(rows), step, np.int32) for step, rows in held.items()])
        self._books.apply(ev.Suspected(name, steps, np.concatenate(list(held.values()))))
        batches = self._ledger.batches
        suspects = {step: rows[batches[step].crashes[rows] > 0] for step, rows in held.items()}
        why = "an engine has crashed with them"
        taken: list[tuple[Worker, Outcome]] = []
        for worker in self._workers.by_name.values():
            numbers = self._ledger.live_among(worker.name, suspects)
            if len(numbers):
                order = Revoke(job=self._job.name, epoch=self._ledger.epoch, assignments=numbers)
                self._tell(worker.address, order)
                taken.append((worker, self._books.apply(ev.Returned(worker.name, numbers, why))))
        for step in held:
            self._drop_poison(batches[step])
        for worker, outcome in taken:
            self._after(worker, outcome)

    def _drop_poison(self, batch: StepBatch) -> None:
        """Set aside the prompts, with all their siblings that wait, that have taken as many engines as one may."""
        guilty = np.unique(np.nonzero(batch.crashes >= self.ctx.limits.engine_crashes_max)[0] // batch.group_size)
        for index in guilty.tolist():
            rows = batch.group_rows(index)
            rows = rows[batch.state[rows] == SampleState.QUEUED]
            if len(rows):
                crashes = int(batch.crashes[rows].max())
                prompt = int(batch.prompts[index])
                why = f"{m.FailureKind.DATA}: poison, {crashes} engines crashed while they held prompt {prompt}"
                self._event("samples_dropped", step=batch.step, samples=len(rows), why=why)
                self._books.apply(ev.Dropped(batch.step, rows, why))
                self._on_settled(batch.step)

    def _drop_hopeless(self, batch: StepBatch, rows: np.ndarray, why: str) -> None:
        limits = self.ctx.limits
        hopeless = (batch.failures[rows] > limits.data_retries) | (batch.attempts[rows] > limits.infrastructure_retries)
        rows = rows[hopeless & (batch.state[rows] == SampleState.QUEUED)]
        if len(rows):
            self._event("samples_dropped", step=batch.step, samples=len(rows), why=why)
            self._books.apply(ev.Dropped(batch.step, rows, why))
            self._on_settled(batch.step)

    def _assign(self) -> None:
        now = self.ctx.now()
        if not self._ledger.paused and self._dispatcher.assign(now):
            for loss in self._recoveries.assigned(now):
                self._event("samples_reassigned", worker=loss.part, samples=loss.samples, after_s=loss.after_s)

    def _lease(self) -> None:
        self._leases.pump()
        if self._leases.all_sent:
            self._meter.cut()
            self._need_batch()
            if self._leases.step > max(self._secured_step, self._securing_step):
                self._securing_step = self._leases.step
                self.ctx.start_task(self._secure(self._leases.step), f"secure step {self._leases.step}")

    def _may_begin(self, batch: StepBatch) -> bool:
        """With a barrier, training waits for all of its step, and for every worker to have loaded what was trained."""
        if self._job.sync.mode != "one_step_barrier" or batch.committed:
            return True
        patience_s, now = self.ctx.limits.pull_patience_s, self.ctx.now()
        loaded = (
            worker.policy_version >= batch.step or now - worker.pulling_since_s >= patience_s
            for worker in self._workers.by_name.values()
        )
        return self._newest_version >= batch.step and whole(batch) and all(loaded)

    async def _secure(self, step: int) -> None:
        """Have the step's samples on disk while the trainer trains on them.

        Otherwise a crash could take them while workers already serve the version that was made of them, and the step
        would be generated anew by its own successor.
        """
        await self._journal.durable()
        self._secured_step = max(self._secured_step, step)
        self._announce_version()

    def _on_settled(self, step: int) -> None:
        if step == self._leases.step:
            self._lease()

    # ------------------------------------------------------------ services and versions

    @handles(m.RegisterService)
    async def register_service(self, offer: m.RegisterService) -> m.Acknowledged:
        self._check_job(offer.job)
        role, before = offer.role, self._services.get(offer.role)
        self._services[role] = offer.address
        if before != offer.address:
            self._count_restart(role, again=before is not None and before.peer != offer.address.peer)
            self._event("service_registered", role=role, address=str(offer.address))
            if before is not None:
                self.ctx.unwatch(before)
        self.ctx.watch(offer.address)
        if role == "rewards":
            self._scoring.serve(offer.address)
        elif role == "job":
            for news in self._untold:
                self._tell(offer.address, news)
            self._untold.clear()
            self._asked_batch = (-1, 0.0)
            self._need_batch()
        elif role in ("weights", "trainer") and before != offer.address:
            self._introduce_weights()
        elif role == "ranker" and before != offer.address:
            self._ask_ranker(list(self._ledger.batches.values()))
        return m.Acknowledged()

    def _introduce_weights(self) -> None:
        """To the trainer, whichever of the two came last: it may still be offering a version to a former server."""
        weights, trainer = self._services.get("weights"), self._services.get("trainer")
        if weights is not None and trainer is not None:
            self._tell(trainer, m.ServiceChanged(job=self._job.name, role="weights", address=weights))

    @handles(m.LookupService)
    async def lookup_service(self, question: m.LookupService) -> m.ServiceFound:
        return m.ServiceFound(address=self._services.get(question.role))

    @handles(m.VersionAvailable)
    async def version_available(self, news: m.VersionAvailable) -> None:
        if news.policy_version < self._offered_version and news.weights == self._weights:
            return
        moved = news.weights != self._weights
        self._offered_version, self._weights = news.policy_version, news.weights
        self._announce_version(moved=moved)

    def _announce_version(self, *, moved: bool = False) -> None:
        """Tell the workers of the newest version that they may serve, if that is news to them."""
        version = min(self._offered_version, self._secured_step + 1)
        if version == self._newest_version and not moved:
            return
        self._newest_version = version
        self._record("version_available", version=version)
        for worker in self._workers.by_name.values():
            self._tell_to_pull(worker)
        self._assign()  # ahead: each worker has been told to pull what it needs

    def _tell_to_pull(self, worker: Worker) -> None:
        if self._weights is not None and worker.policy_version < self._newest_version:
            worker.pulls(self._newest_version, self.ctx.now())
            order = PullVersion(
                job=self._job.name, epoch=self._ledger.epoch, policy_version=self._newest_version, weights=self._weights
            )
            self._tell(worker.address, order)

    @handles(Down)
    async def down(self, news: Down) -> None:
        worker = self._workers.at(news.address)
        if worker is not None:
            self._event("worker_down", worker=worker.name, reason=news.reason, detail=news.detail)
            self._mark_end(worker.name, news)
            crashed = news.reason is Gone.CRASHED or (news.reason is Gone.UNREACHABLE and self._has_crashed(worker))
            self._lose(worker, f"{news.reason} {news.detail}".strip(), crashed=crashed)
        for role, address in list(self._services.items()):
            if _same_life(address, news.address):
                self._event("service_down", role=role, reason=news.reason, detail=news.detail)
                self._mark_end(role, news)
                if role == "trainer":
                    self._recoveries.lost(role, self.ctx.now())
                del self._services[role]
                if role == "rewards":
                    self._scoring.serve(None)
        if self._leases.trainer is not None and _same_life(self._leases.trainer, news.address):
            self._leases.close()

    def _mark_end(self, name: str, news: Down) -> None:
        if news.reason is not Gone.STOPPED:
            self._crashed.add(name)

    # ------------------------------------------------------------ trainer

    @handles(m.OpenStep)
    async def open_step(self, order: m.OpenStep) -> m.Acknowledged:
        self._check_job(order.job)
        async with asyncio.timeout(2 * self.ctx.limits.journal_stall_s), self._committing:  # another one, and ours
            try:
                if self._leases.step < 0:
                    self._meter.begin(self.ctx.now())
                self._leases.open(order.step, order.trainer)
                self.ctx.watch(order.trainer)
            except IllegalTransition as error:
                self._event("open_step_refused", step=order.step, why=str(error))
                raise NotAccepted(str(error)) from error
            self._lease()
        return m.Acknowledged()

    @handles(m.CommitStep)
    @concurrent
    @idempotent
    async def commit_step(self, commit: m.CommitStep) -> m.Committed:
        """Apply, make durable, tell the job, answer. A repeat gets the same answer and changes nothing."""
        self._check_job(commit.job)
        async with asyncio.timeout(2 * self.ctx.limits.journal_stall_s), self._committing:  # another one, and ours
            if commit.step < self._ledger.trainer_step:
                self._tell_again(commit)
                return self._verdict(commit.step)
            batch = self._ledger.batches.get(commit.step)
            replay = batch is not None and batch.committed
            event = ev.Committed(commit.step, commit.prompts, commit.siblings, commit.policy_version)
            try:
                self._books.apply(event)
            except IllegalTransition as error:
                self._event("commit_refused", step=commit.step, replay=int(replay), why=str(error))
                raise NotAccepted(str(error)) from error
            batch = self._ledger.batches[commit.step]
            self._leases.close()
            if not replay:
                self._journal.record(batch)
            await self._journal.durable()
            if not replay:
                self._tell_progress(commit.step)
            self._secured_step = max(self._secured_step, commit.step)
            self._announce_version()
            self._tell_committed(batch, commit, replay=replay)
            self._need_batch()
        await self._until_next_is_known(commit.step + 1)
        return self._verdict(commit.step)

    async def _until_next_is_known(self, step: int) -> None:
        """The trainer must not open a step that will never come, because the data has just ended."""
        try:
            async with asyncio.timeout(self.ctx.limits.next_batch_s):
                while step >= self._ledger.issued_steps and step < self._steps and not self._stop_requested:
                    self._next_known.clear()
                    await self._next_known.wait()
        except TimeoutError:
            self.ctx.log.warning("the next batch is late", step=step)

    def _tell_progress(self, step: int) -> None:
        for loss in self._recoveries.committed(self.ctx.now()):
            self._event("progress_resumed", lost=loss.part, step=step, after_s=loss.after_s)

    def _tell_committed(self, batch: StepBatch, commit: m.CommitStep, *, replay: bool) -> None:
        metrics = self._meter.take(batch, commit.policy_version, commit.metrics, self.ctx.now())
        if not replay:
            metrics |= self._ranking.committed(batch)
            ranker, lesson = self._services.get("ranker"), self._ranking.lesson(batch)
            if ranker is not None and lesson is not None:
                self._tell(ranker, lesson)
        metrics |= self._recoveries.metrics()
        news = m.StepCommitted(job=self._job.name, step=batch.step, replay=replay, metrics=metrics)
        self._told_step = max(self._told_step, batch.step)
        if (job := self._services.get("job")) is not None:
            self._tell(job, news)
        else:
            self._untold.append(news)

    def _tell_again(self, commit: m.CommitStep) -> None:
        """A former life committed the step and died before it could answer, perhaps before the job had its row."""
        batch = self._ledger.batches.get(commit.step)
        if batch is not None and commit.step == self._ledger.trainer_step - 1 > self._told_step:
            self._tell_committed(batch, commit, replay=False)

    def _verdict(self, step: int) -> m.Committed:
        """What the trainer does after ``step``."""
        every = self._job.checkpoint.every
        stop = self._stop_requested or step + 1 >= self._steps
        due = every > 0 and (step + 1) % every == 0
        return m.Committed(step=step, stop=stop, checkpoint=stop or due or self._checkpoint_requested)

    @handles(m.CheckpointTaken)
    @concurrent
    async def checkpoint_taken(self, news: m.CheckpointTaken) -> m.Acknowledged:
        """Note it durably, then let go of what no checkpoint that is kept can replay."""
        counters = self._ledger.counters
        known = {name: int(getattr(counters, name)) for name in counters.__dataclass_fields__}
        try:
            self._books.apply(ev.Checkpointed(news.step, news.path, known))
        except IllegalTransition as error:
            raise NotAccepted(str(error)) from error
        await self._journal.durable()
        self._checkpoint_requested = False
        kept = self._ledger.checkpoints[-self._job.checkpoint.keep :]
        if len(kept) == self._job.checkpoint.keep and kept[0][0] > self._ledger.floor:
            self._ledger.forget(kept[0][0])
            self._journal.prune(kept[0][0])
        final = self._stop_requested or news.step >= self._steps
        self._event("checkpoint_stored", step=news.step, path=news.path)
        if (job := self._services.get("job")) is not None:
            self._tell(job, m.CheckpointStored(job=self._job.name, step=news.step, path=news.path, final=final))
        return m.Acknowledged()

    def _check_job(self, job: str) -> None:
        if job != self._job.name:
            raise NotAccepted(f"this scheduler serves job {self._job.name!r}, not {job!r}")


def _same_life(one: ActorAddress, other: ActorAddress) -> bool:
    """The endpoint is only a way to get there: a sender's may be empty."""
    return (one.name, one.peer) == (other.name, other.peer)


def _batch_event(batch: m.IssueBatch) -> ev.BatchIssued:
    lengths = np.array([len(p.token_ids) for p in batch.prompts], np.int32)
    ids = np.concatenate([np.asarray(p.token_ids, np.int32) for p in batch.prompts]) if batch.prompts else lengths
    return ev.BatchIssued(
        step=batch.step,
        group_size=batch.group_size,
        sampling=batch.sampling,
        prompts=np.array([p.prompt for p in batch.prompts], np.int64),
        prompt_lengths=lengths,
        prompt_ids=ids,
        contexts=[p.context for p in batch.prompts],
    )
