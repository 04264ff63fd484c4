"""The job: feeds prompts to the scheduler, hears of committed steps, and knows when it is done.

    scheduler ──NeedBatch(step)──▶ job ──ReadPrompts──▶ prompts ──▶ job ──IssueBatch(step)──▶ scheduler
    scheduler ──StepCommitted────▶ job ──StepRow──▶ metrics, and progress to whoever listens
    scheduler ──CheckpointStored─▶ job ──▶ finished (all steps), interrupted (StopJob), or the next step

It holds no truth of its own: which steps are committed is the ledger's to say, what they measured is in
metrics.jsonl. So it can be restarted at any moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actors.core.actor import Actor, concurrent, handles
from actors.core.errors import AskError
from actors.jobs.history import Row, read_history
from actors.jobs.messages import CheckpointMade, JobState, JobStatus, PauseJob, QueryJob, StopJob, TakeCheckpoint
from actors.metrics.messages import Event, StepRow
from actors.rewards.messages import PromptsRead, ReadPrompts
from actors.rollout.messages import SamplingParams
from actors.scheduler.messages import (
    Acknowledged,
    BatchIssued,
    CheckpointStored,
    IssueBatch,
    LookupService,
    NeedBatch,
    Progress,
    Prompt,
    QueryProgress,
    RegisterService,
    RequestCheckpoint,
    ServiceFound,
    SetPaused,
    StepCommitted,
)
from configs.schema import JobConfig
from transport.address import ActorAddress

OnProgress = Callable[[dict[str, Any]], None]


class Job(Actor):
    """One RL job. ``done`` is set when its state is final."""

    def __init__(
        self,
        job: JobConfig,
        run_dir: Path,
        *,
        scheduler: ActorAddress,
        metrics: ActorAddress,
        stop_token_ids: tuple[int, ...],
        on_progress: OnProgress,
    ) -> None:
        self._job, self._run_dir = job, run_dir
        self._scheduler, self._metrics = scheduler, metrics
        self._stop_token_ids = stop_token_ids
        self._on_progress = on_progress
        self._history = read_history(run_dir / "metrics.jsonl")
        self._checkpoint = ""
        self._checkpoint_step = -1
        self._last_step = job.steps - 1
        self._stored = asyncio.Event()
        self.state = JobState.STARTING
        self.restarts = 0
        self.done = asyncio.Event()

    async def on_start(self) -> None:
        service = RegisterService(job=self._job.name, role="job", address=self.ctx.self_address)
        await self.ctx.ref(self._scheduler).ask(service, Acknowledged)
        self._move(JobState.RUNNING)
        self.ctx.start_task(self._report_waits(), "report waits")

    # prompts

    @handles(NeedBatch)
    @concurrent
    async def need_batch(self, message: NeedBatch) -> None:
        """Read the prompts of a step and issue them; both are idempotent, so a repeat does no harm."""
        read = await self._read_prompts(message.step)
        if not read.prompts:
            await self._end_of_data(message.step - 1)
            return
        batch = IssueBatch(
            job=self._job.name,
            step=message.step,
            group_size=self._job.algorithm.group_size,
            sampling=self._sampling(),
            prompts=[Prompt(prompt=p.prompt, token_ids=p.token_ids, context=p.context) for p in read.prompts],
        )
        await self.ctx.ref(self._scheduler).ask(batch, BatchIssued)

    async def _read_prompts(self, step: int) -> PromptsRead:
        """Ask the prompt source; wait for one to appear if it is being restarted.

        Raises:
            AskError: there is none, or it cannot read the data, for longer than ``limits.ready_timeout_s``.
        """
        count = self._job.algorithm.prompts_per_step
        question = ReadPrompts(job=self._job.name, start=step * count, count=count)
        until_s = self.ctx.now() + self.ctx.limits.ready_timeout_s
        while True:
            try:
                found = await self.ctx.ref(self._scheduler).ask(LookupService(job=self._job.name, role="prompts"), ServiceFound)
                if found.address is not None:
                    return await self.ctx.ref(found.address).ask(question, PromptsRead)
            except AskError:
                if self.ctx.now() > until_s:
                    raise
            await self.ctx.sleep(self.ctx.limits.backoff_first_s)

    def _sampling(self) -> SamplingParams:
        rollout = self._job.rollout
        return SamplingParams(
            max_tokens=rollout.max_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_token_ids=self._stop_token_ids,
            seed=self._job.seed,
        )

    async def _end_of_data(self, last_step: int) -> None:
        """The data set has ended (``data.epochs``): the steps end with it."""
        self._last_step = min(self._last_step, last_step)
        self._event("end_of_data", last_step=last_step)
        await self._ask_to_stop_after_last()

    async def _ask_to_stop_after_last(self) -> None:
        committed = self._history.last.get("step", -1)
        if int(committed) >= self._last_step - 1:
            await self._request_checkpoint(stop=True)

    # steps

    @handles(StepCommitted)
    async def step_committed(self, message: StepCommitted) -> None:
        if message.replay or message.step in self._history.rewards:
            return
        row: Row = {"step": message.step, **_tidy(message.metrics), "restarts": self.restarts}
        self._history.add(row)
        self.ctx.ref(self._metrics).tell(StepRow(job=self._job.name, row=row))
        self._on_progress({"state": str(self.state), **row, "step": message.step + 1})
        if self._last_step < self._job.steps - 1:
            await self._ask_to_stop_after_last()

    @handles(CheckpointStored)
    async def checkpoint_stored(self, message: CheckpointStored) -> None:
        self._checkpoint, self._checkpoint_step = message.path, message.step
        self._stored.set()
        self._event("checkpoint", step=message.step, path=message.path)
        if message.step > self._last_step:
            self._move(JobState.FINISHED)
        elif message.final:
            self._move(JobState.INTERRUPTED)

    # operators

    @handles(PauseJob)
    async def pause(self, message: PauseJob) -> JobStatus:
        if self.state in (JobState.RUNNING, JobState.PAUSED):
            await self.ctx.ref(self._scheduler).ask(SetPaused(job=self._job.name, paused=message.paused), Acknowledged)
            self._move(JobState.PAUSED if message.paused else JobState.RUNNING)
        return self._status()

    @handles(StopJob)
    async def stop_job(self, message: StopJob) -> JobStatus:
        if not self.state.is_final and self.state is not JobState.STOPPING:
            await self._request_checkpoint(stop=True)
            self._move(JobState.STOPPING)
        return self._status()

    @handles(TakeCheckpoint)
    @concurrent
    async def take_checkpoint(self, message: TakeCheckpoint) -> CheckpointMade:
        self._stored.clear()
        await self._request_checkpoint(stop=False)
        async with asyncio.timeout(self.ctx.limits.checkpoint_timeout_s):
            await self._stored.wait()
        return CheckpointMade(step=self._checkpoint_step, path=self._checkpoint)

    @handles(QueryJob)
    async def query(self, message: QueryJob) -> JobStatus:
        return self._status()

    async def _request_checkpoint(self, *, stop: bool) -> None:
        await self.ctx.ref(self._scheduler).ask(RequestCheckpoint(job=self._job.name, stop=stop), Acknowledged)

    def _status(self) -> JobStatus:
        return JobStatus(job=self._job.name, state=self.state, step=len(self._history.rewards), steps=self._job.steps)

    # telling

    def _move(self, state: JobState) -> None:
        if self.state.is_final or state is self.state:
            return
        self.state = state
        self._event("state", state=str(state))
        self._on_progress({"state": str(state), "steps": self._job.steps})
        if state.is_final:
            self.done.set()

    def _event(self, name: str, **fields: float | str) -> None:
        self.ctx.ref(self._metrics).tell(Event(job=self._job.name, name=name, fields=dict(fields)))

    async def _report_waits(self) -> None:
        """Tell the viewer who is waited for when nothing has been committed for a while."""
        while True:
            await self.ctx.sleep(self.ctx.limits.stall_report_s)
            try:
                progress = await self.ctx.ref(self._scheduler).ask(QueryProgress(job=self._job.name), Progress)
            except AskError:
                continue
            self._on_progress({"waiting_for": progress.waiting_for, "workers": len(progress.workers)})

    def summary(self, *, error: str = "") -> dict[str, Any]:
        """The last line of ``headrace run --json``."""
        history, last = self._history, self._history.last
        summary: dict[str, Any] = {
            "job": self._job.name,
            "state": str(JobState.FAILED if error else self.state),
            "steps": len(history.rewards),
            "reward_first": history.reward_first,
            "reward_last": history.reward_last,
            "samples": history.samples,
            "tokens": history.tokens,
            "seconds": round(history.seconds, 3),
            "restarts": self.restarts,
            "prompts_lost": int(last.get("prompts_lost", 0)),
            "samples_trained_twice": int(last.get("samples_trained_twice", 0)),
            "policy_version": int(last.get("policy_version", 0)),
            "checkpoint": self._checkpoint or None,
        }
        return {**summary, "error": error} if error else summary


_COUNTS = frozenset(
    "policy_version samples tokens_generated tokens_trained response_tokens_max staleness_max samples_migrated "
    "prompts_lost samples_trained_twice".split()
)


def _tidy(metrics: dict[str, float]) -> Row:
    """Counts as integers; everything else as it came."""
    return {key: int(value) if key in _COUNTS else value for key, value in metrics.items()}
