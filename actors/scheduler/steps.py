"""Steps in order: a batch is asked for, the trainer opens it, commits it, and goes on or stops.

    NeedBatch ─▶ job ─IssueBatch─▶ issued ─OpenStep─▶ granted ─CommitStep─▶ applied ─▶ durable ─▶ StepCommitted ─▶ job
                                                                                              └▶ Committed ────▶ trainer

Invariants
- Commits and checkpoints are durable before anyone is told.
- One commit at a time, and none while a step is being opened. A repeat gets the same answer and changes nothing.
- What is applied is told to everybody, also if the trainer that has asked for it dies before it is on disk.
- The job gets a row of every committed step: one that it may have missed, as a life ended in between, is sent again.
  So is the news that it is over.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final

import numpy as np

from actors.fleet.fleet import Fleet
from actors.fleet.scope import JobScope
from actors.ledger import events as ev
from actors.ledger.batch import IN_FLIGHT, SampleState, StepBatch
from actors.ledger.errors import IllegalTransition, NotAccepted
from actors.protocol.batches import IssueBatch
from actors.protocol.evaluations import is_evaluation
from actors.protocol.job_news import CheckpointStored, NeedBatch, StepCommitted
from actors.protocol.steps import CheckpointTaken, CommitStep, Committed, OpenStep
from actors.scheduler.evaluations import Evaluations
from actors.scheduler.examples import Examples
from actors.scheduler.filtering import FILTERED, SpreadFilter
from actors.scheduler.grants import Grants
from actors.scheduler.meter import StepMeter

Row = dict[str, float]
_TO_GENERATE: Final = (SampleState.QUEUED, *IN_FLIGHT, SampleState.WAITING)


class Steps:
    """It takes a job from step to step."""

    def __init__(
        self,
        scope: JobScope,
        fleet: Fleet,
        grants: Grants,
        meter: StepMeter,
        further: Callable[[StepBatch], Row],
        spread: SpreadFilter | None = None,
    ) -> None:
        """``further``: columns of a committed step, besides those of meter and fleet."""
        self._scope = scope
        self._further = further
        self._filter = spread
        self.evaluations = Evaluations(scope, fleet.versions, lambda: self.count)
        self.evaluations.ended = self._tell_end
        self._journal = scope.journaled.journal
        self._fleet = fleet
        self._grants = grants
        self._meter = meter
        self._examples = Examples(scope)
        self.count = 0 if scope.job.only_evaluates else scope.job.steps
        """Number of steps; fewer than the job says once its data has ended."""
        self._failed = ""
        """Reason why the data ended, if they should not have."""
        self._checkpoint_requested = -1
        """Number of committed steps when a checkpoint was last asked for; -1: none is wanted."""
        self._committing = asyncio.Lock()
        self._next_known = asyncio.Event()
        """Event that is set when a batch is issued, or when it is known that none will be."""
        self._asked_batch = (-1, 0.0)
        self._told_step = -1
        """Newest committed step whose row this life has told the job."""
        self._without_workers_s: float | None = None
        """Since when the job is to stop, and nobody generates what its step lacks; None: that is not so."""
        self._stranded = False
        """True once the step under way is given up for that."""
        self._untold: list[StepCommitted] = []
        """News that the job is told as soon as it has registered."""

    # ------------------------------------------------------------ batches

    def issue(self, batch: IssueBatch) -> bool:
        """Enter a batch; False if it has been entered before.

        Raises:
            NotAccepted: it does not fit those before it.
        """
        ledger = self._scope.ledger
        if is_evaluation(batch.step):
            return self.evaluations.issue(_batch_event(batch))
        if batch.step in ledger.batches or batch.step < ledger.committed_steps:
            return self._extend(batch)
        waited_for = ledger.issued_steps == ledger.committed_steps
        try:
            self._scope.journaled.apply(_batch_event(batch))
        except IllegalTransition as error:
            raise NotAccepted(str(error)) from error
        if waited_for:
            self._meter.begin(self._scope.ctx.now())
        self._next_known.set()
        return True

    def _extend(self, more: IssueBatch) -> bool:
        """Enter further prompts of the step that is filtered; False if they have been entered before."""
        ledger = self._scope.ledger
        batch = ledger.batches.get(more.step)
        if self._filter is None or batch is None or batch.committed or more.prompts[0].prompt != ledger.next_prompt:
            return False
        event = _batch_event(more)
        extended = ev.BatchExtended(
            event.step, event.prompts, event.prompt_lengths, event.prompt_ids, event.contexts
        )  # fmt: skip
        try:
            self._scope.journaled.apply(extended)
        except IllegalTransition as error:
            raise NotAccepted(str(error)) from error
        return True

    def need_batch(self) -> None:
        """Ask the job for the next batch: up to the staleness bound, and one step of look-ahead.

        A step that is with the trainer counts as done, so that prompts are read while it trains and not when it has
        committed, which is when everybody else has work.
        """
        self.evaluations.look()
        ledger, now = self._scope.ledger, self._scope.ctx.now()
        job, step = self._scope.services.get("job"), ledger.issued_steps
        done = ledger.committed_steps + self._grants.all_sent
        ahead = self._scope.job.staleness + 1
        if self._filter is not None:  # its prompts begin behind those of the step before, which must be known
            ahead = -1 if self._grants.all_sent and self._grants.step < ledger.committed_steps else 0
        last = min(done + ahead, self.count - 1)
        if job is None or step > last or ledger.stopping:
            return
        asked, at_s = self._asked_batch
        if step != asked or now - at_s > self._scope.limits.ask_timeout_s:
            self._asked_batch = (step, now)
            start = -1 if self._filter is None else ledger.next_prompt
            self._scope.tell(job, NeedBatch(job=self._scope.name, step=step, start=start))

    def data_ended(self, step: int, failed: str) -> None:
        """There is no batch for ``step``."""
        self.count = min(self.count, step)
        self._failed = failed
        if self._filter is not None:
            self._filter.data_ended = True
        self._next_known.set()
        self._end_if_never()

    def request_checkpoint(self) -> None:
        """Have a checkpoint taken with the next commit, which is the last one if the job is stopping.

        One that is stopped while its last version is evaluated has its checkpoint, and ends without.
        """
        self._checkpoint_requested = self._scope.ledger.committed_steps
        self._next_known.set()
        self._end_if_never()
        self._tell_end()

    def _end_if_never(self) -> None:
        """Tell a trainer that has opened a step which will never come: it must not wait for it."""
        ledger, step = self._scope.ledger, self._grants.step
        if step >= self.count or (ledger.stopping and (step not in ledger.batches or self._stranded)):
            self._grants.end()

    def look(self, now: float) -> None:
        """A job that is to stop ends with its step, but does not wait for workers that it does not have.

        What has been generated of the step is in the journal: a resumed run goes on with it.
        """
        ledger = self._scope.ledger
        batch = ledger.batches.get(self._grants.step)
        lacking = batch is not None and not batch.committed and bool(np.isin(batch.state, _TO_GENERATE).any())
        if not (ledger.stopping and lacking) or self._scope.workers.by_name:
            self._without_workers_s = None
        elif self._without_workers_s is None:
            self._without_workers_s = now
        elif now - self._without_workers_s >= self._scope.limits.stop_without_workers_s and not self._stranded:
            self._stranded = True
            self._scope.event("stopped_without_workers", step=self._grants.step)
            self._end_if_never()

    def job_registered(self) -> None:
        """Tell it what it has missed, and ask it anew for what it may have forgotten."""
        for news in self._untold:
            self._scope.tell(self._scope.services["job"], news)
        self._untold.clear()
        self.evaluations.job_registered()
        self._tell_end()
        self.ask_again()

    def ask_again(self) -> None:
        """Ask for the next batch anew: the job, or the source of its prompts, has begun to serve."""
        self._asked_batch = (-1, 0.0)
        if self._filter is not None:
            self._filter.ask_again()
        self.evaluations.ask_again()
        self.need_batch()

    # ------------------------------------------------------------ the trainer

    async def open(self, order: OpenStep) -> None:
        """Raises:
        NotAccepted: it cannot be opened now.
        """
        async with asyncio.timeout(2 * self._scope.limits.journal_stall_s), self._committing:  # another one, and ours
            try:
                if self._grants.step < 0:
                    self._meter.begin(self._scope.ctx.now())
                self._grants.open(order.step, order.trainer)
                self._scope.ctx.watch(order.trainer)
            except IllegalTransition as error:
                self._scope.event("open_step_refused", step=order.step, why=str(error))
                raise NotAccepted(str(error)) from error
            self._end_if_never()

    async def commit(self, commit: CommitStep) -> Committed:
        """Apply, make durable, tell the job, answer.

        Raises:
            NotAccepted: it is not the step that is open, or does not name its samples.
        """
        async with asyncio.timeout(2 * self._scope.limits.journal_stall_s):
            await self._committing.acquire()  # another one, and ours
        known = False
        try:
            if commit.step < self._scope.ledger.trainer_step:
                self._tell_again(commit)
                return self._verdict(commit.step)
            batch, replay = self._apply(commit)
            known = True
        finally:
            if not known:
                self._committing.release()
        await self._to_the_end(self._make_known(batch, commit, replay=replay), f"commit step {commit.step}")
        await self._until_next_is_known(commit.step + 1)
        return self._verdict(commit.step)

    def _apply(self, commit: CommitStep) -> tuple[StepBatch, bool]:
        """Enter the commit; returns its batch, and whether it was committed before."""
        scope = self._scope
        batch = scope.ledger.batches.get(commit.step)
        replay = batch is not None and batch.committed
        event = ev.Committed(commit.step, commit.prompts, commit.siblings, commit.policy_version)
        try:
            scope.journaled.apply(event)
        except IllegalTransition as error:
            scope.event("commit_refused", step=commit.step, replay=int(replay), why=str(error))
            raise NotAccepted(str(error)) from error
        return scope.ledger.batches[commit.step], replay

    async def _make_known(self, batch: StepBatch, commit: CommitStep, *, replay: bool) -> None:
        """Store a commit that is applied, and tell everybody; then the next one may come."""
        try:
            self._grants.close()
            if not replay:
                self._journal.record(batch)
            async with asyncio.timeout(2 * self._scope.limits.journal_stall_s):
                await self._journal.durable()
            if not replay:
                self._tell_progress(commit.step)
            self._fleet.versions.secured(commit.step)
            self._tell_committed(batch, commit, replay=replay)
            self.need_batch()
        finally:
            self._committing.release()

    async def _to_the_end(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Wait for ``work``, which goes on if whoever asked for it dies meanwhile: what the ledger holds has happened,
        and everybody else is to hear of it.
        """
        async with asyncio.timeout(3 * self._scope.limits.journal_stall_s):  # the journal gives up before that
            await asyncio.shield(self._scope.ctx.start_task(work, name))

    async def _until_next_is_known(self, step: int) -> None:
        """Wait: the trainer must not open a step that will never come because the data has just ended."""
        ledger = self._scope.ledger
        try:
            async with asyncio.timeout(self._scope.limits.next_batch_s):
                while step >= ledger.issued_steps and step < self.count and not ledger.stopping:
                    self._next_known.clear()
                    await self._next_known.wait()
        except TimeoutError:
            self._scope.ctx.log.warning("the next batch is late", step=step)

    def _tell_progress(self, step: int) -> None:
        for loss in self._fleet.recoveries.committed(self._scope.ctx.now()):
            self._scope.event("progress_resumed", lost=loss.part, step=step, after_s=loss.after_s)

    def _tell_committed(self, batch: StepBatch, commit: CommitStep, *, replay: bool) -> None:
        metrics = self._meter.take(batch, commit.policy_version, commit.metrics, self._scope.ctx.now())
        metrics |= self._fleet.committed(batch, commit.metrics, replay=replay) | self._further(batch)
        reasons = [reason for reason in batch.drop_reasons.values() if reason not in FILTERED]
        dropped = Counter(reasons).most_common(self._scope.limits.drop_reasons_told)
        news = StepCommitted(
            job=self._scope.name, step=batch.step, replay=replay, metrics=metrics, dropped=dict(dropped)
        )
        self._told_step = max(self._told_step, batch.step)
        if (job := self._scope.services.get("job")) is not None:
            self._scope.tell(job, news)
        else:
            self._untold.append(news)
        if not replay:
            self._examples.show(batch)

    def _tell_again(self, commit: CommitStep) -> None:
        """A former life committed the step and died before it could answer, perhaps before the job had its row."""
        ledger = self._scope.ledger
        batch = ledger.batches.get(commit.step)
        if batch is not None and commit.step == ledger.trainer_step - 1 > self._told_step:
            self._tell_committed(batch, commit, replay=False)

    def _verdict(self, step: int) -> Committed:
        """What the trainer does after ``step``."""
        every = self._scope.job.checkpoint.every
        stop = self._scope.ledger.stopping or step + 1 >= self.count
        due = (every > 0 and (step + 1) % every == 0) or self.evaluations.wants_checkpoint(step + 1)
        asked = 0 <= self._checkpoint_requested <= step  # a replay has not come to it yet
        return Committed(step=step, stop=stop, checkpoint=stop or due or asked, spared=self.evaluations.spared())

    async def checkpoint_taken(self, news: CheckpointTaken) -> None:
        """Note it durably, then let go of what no checkpoint that is kept can replay.

        Raises:
            NotAccepted: it is ahead of what is committed.
        """
        scope, ledger = self._scope, self._scope.ledger
        known = {name: int(getattr(ledger.counters, name)) for name in ledger.counters.__dataclass_fields__}
        try:
            scope.journaled.apply(ev.Checkpointed(news.step, news.path, known, news.final))
        except IllegalTransition as error:
            raise NotAccepted(str(error)) from error
        await self._to_the_end(self._keep(news), f"checkpoint at step {news.step}")

    async def _keep(self, news: CheckpointTaken) -> None:
        scope, ledger = self._scope, self._scope.ledger
        await self._journal.durable()
        if news.step > self._checkpoint_requested:  # else it was being stored before anybody asked
            self._checkpoint_requested = -1
        kept = ledger.checkpoints[-scope.job.checkpoint.keep :]
        if len(kept) == scope.job.checkpoint.keep and kept[0][0] > ledger.floor:
            ledger.forget(kept[0][0])
            beside = [ledger.batches[step].beside_step for step in ledger.evaluations]
            self._journal.prune(min([kept[0][0], *beside]))
        scope.event("checkpoint_stored", step=news.step, path=news.path)
        await self.evaluations.mark_best()
        if not news.final:
            self._tell_stored()
        self._tell_end()

    def _tell_end(self) -> None:
        """Tell the job that it is over, if it is."""
        if self._scope.ledger.ended and (self._failed or not self.evaluations.end_is_open):
            self._tell_stored()

    def _tell_stored(self) -> None:
        """Tell the job of the newest checkpoint."""
        scope, ledger = self._scope, self._scope.ledger
        if (job := scope.services.get("job")) is not None:
            (step, path), final = ledger.checkpoints[-1], ledger.ended
            failed = "" if ledger.stopping else self._failed
            scope.tell(job, CheckpointStored(scope.name, step, path, final, ledger.stopping, failed))


def _batch_event(batch: IssueBatch) -> ev.BatchIssued:
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
        episodes=batch.episodes,
    )
