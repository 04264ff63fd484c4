"""Takes a job through its steps: a batch is asked for, the trainer opens the step, commits it, and goes on or stops.

    NeedBatch ─▶ job ─IssueBatch─▶ issued ─OpenStep─▶ granted ─CommitStep─▶ APPLIED ─▶ STORED ─▶ StepCommitted ─▶ job
                                                                                      TOLD └▶ Committed ──────▶ trainer

Invariants
- Commits and checkpoints are durable before anyone is told.
- One commit at a time, and none while a step is being opened. A repeat gets the same answer and changes nothing.
- A commit that is applied is announced, even if the trainer that asked for it dies before it is on disk: once applied,
  it is a task of its own.
- The job gets a row of every committed step: one that it may have missed because a life ended is sent again. So is the
  news that the job is over.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import numpy as np

from actors.fleet.fleet import Fleet
from actors.fleet.scope import JobScope
from actors.ledger import events as ev
from actors.ledger.batch import IN_FLIGHT, SampleState, StepBatch
from actors.ledger.errors import IllegalTransition
from actors.protocol.batches import IssueBatch
from actors.protocol.evaluations import is_evaluation
from actors.protocol.failures import NotAccepted
from actors.protocol.job_news import CheckpointStored, NeedBatch, StepCommitted
from actors.protocol.steps import CheckpointTaken, CommitStep, Committed, OpenStep
from actors.scheduler.episodes import Episodes
from actors.scheduler.evaluations import Evaluations
from actors.scheduler.examples import Examples
from actors.scheduler.filtering import FILTERED, SpreadFilter
from actors.scheduler.grants import Grants
from actors.scheduler.meter import StepMeter

_TO_GENERATE: Final = (SampleState.QUEUED, *IN_FLIGHT, SampleState.WAITING)
_UNSETTLED: Final = (*_TO_GENERATE, SampleState.FINISHED)


class CommitState(Enum):
    """Says how far a commit has come. A refused commit has no state, since it changes nothing."""

    APPLIED = "applied"
    """The ledger has the commit; the disk does not yet."""
    STORED = "stored"
    """The disk has the commit, which is now announced."""
    TOLD = "told"
    """The next step may be opened or committed."""
    FAILED = "failed"
    """The disk has not confirmed the commit: the next life of the scheduler may find it there, or not."""


@dataclass(slots=True)
class _Commit:
    """Holds one commit, from when it is applied until it is announced."""

    order: CommitStep
    batch: StepBatch
    replay: bool
    """Whether the step was committed before."""
    state: CommitState = CommitState.APPLIED
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that is set at the end."""

    @property
    def under_way(self) -> bool:
        return self.state in (CommitState.APPLIED, CommitState.STORED)

    def end(self, state: CommitState) -> None:
        self.state = state
        self.over.set()


class Steps:
    """Takes a job from step to step."""

    def __init__(
        self,
        scope: JobScope,
        fleet: Fleet,
        grants: Grants,
        meter: StepMeter,
        episodes: Episodes,
        spread: SpreadFilter | None = None,
    ) -> None:
        self._scope = scope
        self._episodes = episodes
        self._filter = spread
        self.evaluations = Evaluations(
            scope, fleet.versions, lambda: self.count, ended=self._tell_end, of_episodes=episodes.evaluated
        )
        self._journal = scope.ledger_writer.journal
        self._fleet = fleet
        self._grants = grants
        self._meter = meter
        self._examples = Examples(scope)
        self.count = 0 if scope.job.only_evaluates else scope.job.steps
        """Number of steps; fewer than the job file says if its data has ended."""
        self._failed = ""
        """Reason why the data ended too early; empty if they did not."""
        self._checkpoint_requested = -1
        """Number of committed steps when a checkpoint was last asked for; -1: none is wanted."""
        self._commit: _Commit | None = None
        """The newest commit of this life."""
        self._queue = asyncio.Lock()
        """Lock that the first waiter for the end of ``_commit`` holds, so that waiters are served in order."""
        self._next_known = asyncio.Event()
        """Event that is set when a batch is issued, or when it is known that none will be."""
        self._asked_batch = (-1, 0.0)
        self._told_step = -1
        """Newest committed step whose row this life has sent to the job."""
        self._without_workers_s: float | None = None
        """Time since which the job is to stop and no worker generates what its step lacks; None: that is not so."""
        self._moved: tuple[tuple[int, ...], float] = ((), 0.0)
        """How far the step of a job that is to stop has come, and since when it stands there."""
        self._stranded = False
        """Whether the step under way was given up, since nobody seemed to finish it."""
        self._untold: list[StepCommitted] = []
        """News that the job is told as soon as it has registered."""

    # ------------------------------------------------------------ batches

    def issue(self, batch: IssueBatch) -> bool:
        """Enter a batch; False if it has been entered before.

        Raises:
            NotAccepted: the batch does not fit those before it.
        """
        ledger = self._scope.ledger
        if is_evaluation(batch.step):
            return self.evaluations.issue(_batch_event(batch))
        if batch.step in ledger.batches or batch.step < ledger.committed_steps:
            return self._extend(batch)
        waited_for = ledger.issued_steps == ledger.committed_steps
        try:
            self._scope.ledger_writer.apply(_batch_event(batch))
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
            self._scope.ledger_writer.apply(extended)
        except IllegalTransition as error:
            raise NotAccepted(str(error)) from error
        return True

    def need_batch(self) -> None:
        """Ask the job for the next batch: up to the staleness bound, and one step of look-ahead.

        A step whose groups are all with the trainer counts as done, so that prompts are read while it trains, and not
        after its commit, when workers already wait for them.
        """
        self.evaluations.look()
        ledger, now = self._scope.ledger, self._scope.ctx.now()
        job, step = self._scope.services.get("job"), ledger.issued_steps
        done = ledger.committed_steps + self._grants.all_sent
        ahead = self._scope.job.staleness + 1
        if self._filter is not None:  # a step's prompts follow those of the step before, whose number must be known
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
        """Note that there is no batch for ``step``. ``failed``: why not, if there should be one."""
        self.count = min(self.count, step)
        self._failed = failed
        if self._filter is not None:
            self._filter.data_ended = True
        self._next_known.set()
        self._end_if_never()

    def request_checkpoint(self) -> None:
        """Have a checkpoint taken with the next commit, which is the last one if the job is stopping.

        A job that is stopped while its last version is evaluated has its checkpoint already, and ends at once.
        """
        self._checkpoint_requested = self._scope.ledger.committed_steps
        self._next_known.set()
        self._end_if_never()
        self._tell_end()

    def _end_if_never(self) -> None:
        """Tell the trainer if the step that it has opened will never come, so that it does not wait."""
        ledger, step = self._scope.ledger, self._grants.step
        if step >= self.count or (ledger.stopping and (step not in ledger.batches or self._stranded)):
            self._grants.end()

    def look(self, now: float, waiting_for: Callable[[int], str]) -> None:
        """Give up the step under way if the job is to stop, and nobody seems to finish the step.

        That is so if there have been no workers for ``stop_without_workers_s``, or if for ``stop_silence_s`` no sample
        of the step has got a token or an end: an agent, an environment or a judge hangs or is away. Its tokens are in
        the journal: a resumed run continues the step. ``waiting_for``: says for what or whom a step waits.
        """
        ledger, limits = self._scope.ledger, self._scope.limits
        batch = ledger.batches.get(self._grants.step)
        if batch is None or batch.committed or not ledger.stopping:
            self._without_workers_s, self._moved = None, ((), now)
            return
        lacks_tokens = bool(np.isin(batch.state, _TO_GENERATE).any())
        if not lacks_tokens or self._scope.workers.by_name:
            self._without_workers_s = None
        elif self._without_workers_s is None:
            self._without_workers_s = now
        so_far = (batch.step, len(batch), int(batch.length.sum()), int(np.isin(batch.state, _UNSETTLED).sum()))
        if so_far != self._moved[0] or self._grants.all_sent or self._grants.trainer is None:
            self._moved = (so_far, now)
        if self._without_workers_s is not None and now - self._without_workers_s >= limits.stop_without_workers_s:
            self._strand("stopped_without_workers", "")
        elif now - self._moved[1] >= limits.stop_silence_s:
            self._strand("stopped_in_silence", waiting_for(batch.step))

    def _strand(self, event: str, waited_for: str) -> None:
        if self._stranded:
            return
        self._stranded, step = True, self._grants.step
        if waited_for:
            self._scope.event(event, step=step, waited_for=waited_for)
            left = f"step {step} is left as it is in the journal, and a resumed run goes on with it"
            self._scope.trouble(event, f"the job is to stop, and waited for {waited_for}: {left}")
        else:
            self._scope.event(event, step=step)
        self._end_if_never()

    def job_registered(self) -> None:
        """Tell the job the news that it has missed, and ask it again for batches."""
        for news in self._untold:
            self._scope.tell(self._scope.services["job"], news)
        self._untold.clear()
        self.evaluations.job_registered()
        self._tell_end()
        self.ask_again()

    def ask_again(self) -> None:
        """Ask for the next batch again, since the job, or the source of its prompts, has begun to serve."""
        self._asked_batch = (-1, 0.0)
        if self._filter is not None:
            self._filter.ask_again()
        self.evaluations.ask_again()
        self.need_batch()

    # ------------------------------------------------------------ the trainer

    async def open(self, order: OpenStep) -> None:
        """Raises:
        NotAccepted: the step cannot be opened now.
        """
        await self._last_commit_over()
        try:
            if self._grants.step < 0:
                self._meter.begin(self._scope.ctx.now())
            self._grants.open(order.step, order.trainer)
            self._scope.ctx.watch(order.trainer)
        except IllegalTransition as error:
            self._scope.event("open_step_refused", step=order.step, why=str(error))
            raise NotAccepted(str(error)) from error
        self._end_if_never()

    async def commit(self, order: CommitStep) -> Committed:
        """Apply the commit, make it durable, tell the job, and answer.

        Raises:
            NotAccepted: the commit is not of the open step, or does not name its samples.
        """
        await self._last_commit_over()
        if order.step < self._scope.ledger.trainer_step:
            self._tell_again(order)
            return self._verdict(order.step)
        self._commit = commit = self._apply(order)
        await self._to_the_end(self._make_known(commit), f"commit step {order.step}")
        await self._until_next_is_known(order.step + 1)
        return self._verdict(order.step)

    async def _last_commit_over(self) -> None:
        """Wait until no commit is under way. Several may wait, in order; the first may begin another commit."""
        async with asyncio.timeout(2 * self._scope.limits.journal_stall_s), self._queue:  # another one, and ours
            while self._commit is not None and self._commit.under_way:
                await self._commit.over.wait()

    def _apply(self, order: CommitStep) -> _Commit:
        """Enter the commit into the ledger."""
        scope = self._scope
        batch = scope.ledger.batches.get(order.step)
        replay = batch is not None and batch.committed
        event = ev.Committed(order.step, order.prompts, order.siblings, order.policy_version)
        try:
            scope.ledger_writer.apply(event)
        except IllegalTransition as error:
            scope.event("commit_refused", step=order.step, replay=int(replay), why=str(error))
            raise NotAccepted(str(error)) from error
        return _Commit(order, scope.ledger.batches[order.step], replay)

    async def _make_known(self, commit: _Commit) -> None:
        """Store a commit that is applied, and announce it; then the next one may come."""
        step, reached = commit.batch.step, CommitState.FAILED
        try:
            self._grants.close()
            if not commit.replay:
                self._journal.record(commit.batch)
            async with asyncio.timeout(2 * self._scope.limits.journal_stall_s):
                await self._journal.durable()
            commit.state = CommitState.STORED
            if not commit.replay:
                self._tell_progress(step)
            self._fleet.versions.secured(step)
            self._tell_committed(commit.batch, commit.order, replay=commit.replay)
            self.need_batch()
            reached = CommitState.TOLD
        finally:
            commit.end(reached)

    async def _to_the_end(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Wait for ``work``, which goes on even if this call is cancelled: everybody must hear of what the ledger
        already holds.
        """
        async with asyncio.timeout(3 * self._scope.limits.journal_stall_s):  # the journal gives up before that
            await asyncio.shield(self._scope.ctx.start_task(work, name))

    async def _until_next_is_known(self, step: int) -> None:
        """Wait until it is known whether ``step`` comes: the trainer must not open a step that has no data."""
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
        metrics |= self._fleet.committed(batch, commit.metrics, replay=replay) | self._episodes.committed(batch)
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
        """Send the job the row of the last step, if a former life committed it and may have died before it did."""
        ledger = self._scope.ledger
        batch = ledger.batches.get(commit.step)
        if batch is not None and commit.step == ledger.trainer_step - 1 > self._told_step:
            self._tell_committed(batch, commit, replay=False)

    def _verdict(self, step: int) -> Committed:
        """The answer that tells the trainer what to do after ``step``."""
        every = self._scope.job.checkpoint.every
        stop = self._scope.ledger.stopping or step + 1 >= self.count
        due = (every > 0 and (step + 1) % every == 0) or self.evaluations.wants_checkpoint(step + 1)
        asked = 0 <= self._checkpoint_requested <= step  # false for replayed steps before the request
        return Committed(step=step, stop=stop, checkpoint=stop or due or asked, spared=self.evaluations.spared())

    async def checkpoint_taken(self, news: CheckpointTaken) -> None:
        """Enter the checkpoint durably, then drop the batches that no kept checkpoint needs for a replay.

        Raises:
            NotAccepted: the checkpoint is ahead of the committed steps.
        """
        scope, ledger = self._scope, self._scope.ledger
        known = {name: int(getattr(ledger.counters, name)) for name in ledger.counters.__dataclass_fields__}
        try:
            scope.ledger_writer.apply(ev.Checkpointed(news.step, news.path, known, news.final))
        except IllegalTransition as error:
            raise NotAccepted(str(error)) from error
        await self._to_the_end(self._keep(news), f"checkpoint at step {news.step}")

    async def _keep(self, news: CheckpointTaken) -> None:
        scope, ledger = self._scope, self._scope.ledger
        await self._journal.durable()
        if news.step > self._checkpoint_requested:  # else it was already being stored at the time of the request
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
        """Tell the job that it is over, if that is so."""
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
