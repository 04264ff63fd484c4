"""The job: brings prompts in, keeps the record of steps, and is what an operator talks to.

    scheduler ──NeedBatch──▶ job ──ReadPrompts──▶ prompts        job ──IssueBatch──▶ scheduler
    scheduler ──StepCommitted, CheckpointStored──▶ job ──StepRow, Event──▶ metrics
                                                   └──JobEvent──▶ the process that runs it

    loop            waits for                      unblocked by
    issue a batch   the prompt source              its registration, upon which the scheduler asks again; retried
                                                   until the batch is issued or can never be (issuing.py)
    stop            the final checkpoint           CheckpointStored(final)

Invariants
- Prompt i of step s has the ordinal ``s * prompts_per_step + i``, whatever happened before: a restart repeats it. With
  ``algorithm.filter`` a step goes on until it has enough, and the ledger says where the next one begins.
- A replayed step gives no second row and is not counted twice.
- A job that is over stays over.
- A job that trained on nothing fails: after ``limits.empty_steps_max`` steps in a row, or at its end.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from actors.core.actor import concurrent, handles
from actors.core.errors import AskError, ReplyError
from actors.core.patience import Patience
from actors.core.ref import ActorRef
from actors.core.registered import RegisteredActor
from actors.core.watch import Down
from actors.jobs.evaluation_rows import EvalRow, version_of_row
from actors.jobs.evaluation_rows import read_rows as read_evaluations
from actors.jobs.evaluation_rows import row_of as row_of_evaluation
from actors.jobs.evaluation_rows import summary_of as summary_of_evaluations
from actors.jobs.issuing import Issuing
from actors.jobs.summary import Summary, cost_of, read_rows, row_of
from actors.jobs.troubles import RunWatch, Warned
from actors.protocol import jobs as jm
from actors.protocol.batches import Progress, QueryProgress, RequestCheckpoint, SetPaused
from actors.protocol.evaluations import EvaluationDone, EvaluationRow, NeedEvaluation, evaluation_step
from actors.protocol.failures import Acknowledged
from actors.protocol.job_news import (
    CheckpointStored,
    GenerationEnded,
    JobEvent,
    NeedBatch,
    StepCommitted,
    StepPlanned,
    Trouble,
    WorkerNews,
    WorkerReleased,
    WorkerWoken,
)
from actors.protocol.jobs import JobState
from actors.protocol.metrics import Event, Flush, Flushed, StepRow
from actors.protocol.services import RegisterService
from configs.run_files import EVALUATIONS, METRICS
from configs.schema import JobConfig
from transport.address import ActorAddress

_STOPPED: Final = "stopped by its operator"


class NotPossible(ReplyError):
    """The operator asks for what the job's state does not allow; the text says which state."""


class Job(RegisteredActor):
    """Runs one job: issues its batches, keeps its record, answers its operator.

    Args:
        stop_token_ids: see ``stop_tokens.py``.
        restarts: returns the supervisors' count of restarts, which replaces the scheduler's.
        take_cost: returns what the job's machines have cost since the call before; None: no prices are known.
        take_bill: returns the columns of what its functions were billed, before ``take_cost``; None: it has none.
        listener: is told every JobEvent, on behalf of the process that runs the job.
    """

    def __init__(
        self,
        config: JobConfig,
        scheduler: ActorAddress,
        metrics: ActorAddress | None = None,
        *,
        run_dir: Path | None = None,
        stop_token_ids: tuple[int, ...] = (),
        restarts: Callable[[], int] | None = None,
        take_cost: Callable[[], float] | None = None,
        take_bill: Callable[[], dict[str, float]] | None = None,
        listener: ActorAddress | None = None,
    ) -> None:
        self._config = config
        self._scheduler_at = scheduler
        self._metrics_at = metrics
        self._run_dir = run_dir
        self._stop_token_ids = stop_token_ids
        self._restarts = restarts
        self._take_cost = take_cost
        self._take_bill = take_bill
        self._listener = listener
        self._summary = Summary()
        self._evaluations: dict[int, EvalRow] = {}
        """Rows of eval.jsonl by version."""
        self._watch = RunWatch(config.limits, self._warn)
        self._hopeless = ""
        """Reason why the run is being ended as failed; empty while it is not."""
        self._checkpoint_waiters: list[tuple[int, asyncio.Future[jm.CheckpointReport]]] = []
        """Waiters, each with the number of steps committed when it asked: a checkpoint of more steps answers it."""
        self._checkpoint = ""
        self._reason = ""
        self._waiting_for = ""
        self._over = asyncio.Event()
        self.state = JobState.SUBMITTED

    # ------------------------------------------------------------ for the process that hosts the job

    async def wait_over(self, timeout_s: float | None = None) -> JobState:
        """Wait until the job is finished, failed or interrupted, or this actor has ended.

        Raises:
            TimeoutError.
        """
        async with asyncio.timeout(timeout_s):
            await self._over.wait()
        return self.state

    def result(self) -> dict[str, Any]:
        """The object that ``run --json`` prints. ``reward_*`` are None before the first step."""
        summary = self._summary
        known = {
            "job": self._config.name,
            "state": self.state.value,
            **summary.result(),
            **({} if self._config.eval is None else {"eval": summary_of_evaluations(self._evaluations.values())}),
            "checkpoint": self._checkpoint,
            **({"error": self._reason} if self.state is JobState.FAILED else {}),
        }
        counted = {} if self._restarts is None else {"restarts": self._restarts()}
        return known | counted | ({} if self._take_cost is None else summary.cost())

    # ------------------------------------------------------------ life

    async def on_start(self) -> None:
        self._scheduler = self.ctx.ref(self._scheduler_at)
        self._batches = Issuing(self.ctx, self._config, self, self._scheduler, self._stop_token_ids)
        if self._run_dir is not None:
            rows = await self.ctx.run_blocking(read_rows, self._run_dir / METRICS)
            for row in rows:
                self._summary.add(row)
            for row in await self.ctx.run_blocking(read_evaluations, self._run_dir / EVALUATIONS):
                self._evaluations[version_of_row(row)] = row
            self._watch.take_over(rows, self._config.staleness + 2)
        self._publish("begun", {})
        self.obey(self._scheduler_at, math.inf)  # only its supervisor decides when it is gone for good
        await self.register()

    async def on_stop(self) -> None:
        self._over.set()

    async def introduce(self, scheduler: ActorRef) -> None:
        if self.state.over:
            return  # neither has anything more to do
        service = RegisterService(job=self._config.name, role="job", address=self.ctx.self_address)
        await scheduler.ask(service, Acknowledged)
        progress = await scheduler.ask(QueryProgress(job=self._config.name), Progress)
        if progress.paused and self.state in (JobState.SUBMITTED, JobState.RUNNING):
            self._change(JobState.PAUSED)  # its operator paused it under the head before this one
        if progress.stopping:
            self._hopeless = self._hopeless or self._watch.hopeless_before
            self._change(JobState.STOPPING, self._hopeless or _STOPPED)

    def scheduler_lost(self, message: Down) -> None:
        if not self.state.over:
            self.register_again()

    # ------------------------------------------------------------ prompts

    @handles(NeedBatch)
    async def need_batch(self, order: NeedBatch) -> None:
        if self.state is JobState.SUBMITTED:
            self._change(JobState.RUNNING)
        if not self.state.over:
            self._batches.need(order)

    @handles(NeedEvaluation)
    async def need_evaluation(self, order: NeedEvaluation) -> None:
        if self.state is JobState.SUBMITTED:
            self._change(JobState.RUNNING)
        if not self.state.over:
            self._batches.need(NeedBatch(job=order.job, step=evaluation_step(order.version)))

    @property
    def over(self) -> bool:
        return self.state.over

    def event(self, name: str, message: str = "", **fields: float | str) -> None:
        """Record an event, and tell people the message."""
        self._event(name, **fields)
        if message:
            self._publish("message", {"message": message})

    def waits(self, what: str) -> None:
        """Publish what the next batch waits for; empty: nothing."""
        if what != self._waiting_for:
            self._waiting_for = what
            self._publish("waiting", {"waiting_for": what})

    def fail(self, reason: str) -> None:
        """Let the job fail: nothing can be trained."""
        self._change(JobState.FAILED, reason)

    # ------------------------------------------------------------ the record

    @handles(StepCommitted)
    async def step_committed(self, news: StepCommitted) -> None:
        if self.state is JobState.SUBMITTED:
            self._change(JobState.RUNNING)
        if news.replay:
            self._event("step_replayed", step=news.step)
            return
        if news.step < self._summary.steps:
            return  # a restarted scheduler repeats news that its former life may not have sent
        row = row_of(news.metrics)
        if self._restarts is not None:
            row["restarts"] = self._restarts()
        if self._take_bill is not None:
            row |= self._take_bill()
        if self._take_cost is not None:
            row |= cost_of(row, self._take_cost())
        self._summary.add(row)
        if self._metrics_at is not None:
            self.ctx.ref(self._metrics_at).tell(StepRow(job=self._config.name, row=row))
        self._publish("step", row)
        self._watch.step(row, news.dropped)
        if (why := self._watch.hopeless) and not self._hopeless:
            self._hopeless = why
            self.ctx.start_task(self._end_early(), "end early")

    @handles(EvaluationDone)
    async def evaluation_done(self, news: EvaluationDone) -> None:
        if not news.figures or news.version in self._evaluations:
            return  # a restarted scheduler repeats news that its former life may not have sent
        row = self._evaluations[news.version] = row_of_evaluation(news.version, news.figures)
        if self._metrics_at is not None:
            self.ctx.ref(self._metrics_at).tell(EvaluationRow(job=self._config.name, row=row))
        self._publish("evaluation", row)
        if self._config.only_evaluates:
            self._change(JobState.FINISHED)

    async def _end_early(self) -> None:
        """Have a checkpoint taken, and no further step; the job fails when the checkpoint comes."""
        patience = Patience(self._config.limits, self.ctx.rng("end early"))
        while not self.state.over:
            try:
                await self._scheduler.ask(RequestCheckpoint(job=self._config.name, stop=True), Acknowledged)
                break
            except AskError as error:
                self.ctx.log.warning("the scheduler does not hear that the run is to end", error=str(error))
                await self.ctx.sleep(patience.pause_s())
        self._change(JobState.STOPPING, self._hopeless)

    @handles(Trouble)
    async def trouble(self, news: Trouble) -> None:
        self._watch.trouble(news)

    @handles(StepPlanned, WorkerReleased, WorkerWoken, GenerationEnded)
    async def worker_news(self, news: WorkerNews) -> None:
        """Pass the news on to the listener, which alone needs it."""
        if self._listener is not None:
            self.ctx.ref(self._listener).tell(news)

    def _warn(self, warned: Warned) -> None:
        """Tell people of trouble, and write it to events.jsonl."""
        self._event("trouble", kind=warned.kind, message=warned.text, count=warned.times)
        self._publish("trouble", {"trouble": warned.kind, "message": warned.text, "count": warned.times})

    @handles(CheckpointStored)
    async def checkpoint_stored(self, news: CheckpointStored) -> None:
        self._checkpoint = news.path
        report = jm.CheckpointReport(step=news.step, path=news.path)
        waiters, self._checkpoint_waiters = self._checkpoint_waiters, []
        for steps, waiter in waiters:
            if news.step <= steps and not news.final:
                self._checkpoint_waiters.append((steps, waiter))
            elif not waiter.done():
                waiter.set_result(report)
        self._publish("checkpoint", {"step": news.step, "path": news.path})
        if news.final:
            if not self._hopeless and self._summary.steps and not self._summary.samples:
                self._hopeless = f"no sample was trained in {self._summary.steps} steps: {self._watch.cause()}"
            if news.stopped:
                self._change(JobState.STOPPING, self._hopeless or _STOPPED)
            interrupted = self.state is JobState.STOPPING and news.step < self._config.steps
            failed = self._hopeless or news.failed
            end = JobState.FAILED if failed else JobState.INTERRUPTED if interrupted else JobState.FINISHED
            self._change(end, failed or self._reason)

    def _event(self, name: str, **fields: float | str) -> None:
        if self._metrics_at is not None:
            self.ctx.ref(self._metrics_at).tell(Event(job=self._config.name, name=name, fields=dict(fields)))

    def _publish(self, kind: str, fields: Mapping[str, Any]) -> None:
        if self._listener is not None:
            event = JobEvent(job=self._config.name, kind=kind, fields=dict(fields), result=self.result())
            self.ctx.ref(self._listener).tell(event)

    def _change(self, state: JobState, reason: str = "") -> None:
        if self.state.over or state is self.state:
            return
        self.state, self._reason = state, reason
        self._event("job_state", state=state.value, reason=reason)
        self._publish("state", {"state": state.value, "reason": reason})
        if state.over:
            for _, waiter in self._checkpoint_waiters:
                if not waiter.done():
                    waiter.set_exception(NotPossible(f"the job is {state}: no further checkpoint will be taken"))
            self.ctx.start_task(self._end(), "end")

    async def _end(self) -> None:
        """Announce the end, once the last row is in its file."""
        if self._metrics_at is not None:
            try:
                await self.ctx.ref(self._metrics_at).ask(Flush(job=self._config.name), Flushed)
            except AskError as error:
                self.ctx.log.warning("the last metrics may be missing", error=str(error))
        self._over.set()
        self._publish("ended", {})

    # ------------------------------------------------------------ operators

    @handles(jm.PauseJob, jm.ResumeJob)
    async def pause_or_resume(self, order: jm.PauseJob | jm.ResumeJob) -> jm.JobReport:
        pause = isinstance(order, jm.PauseJob)
        self._require(JobState.SUBMITTED, JobState.RUNNING, JobState.PAUSED, to="pause" if pause else "resume")
        await self._scheduler.ask(SetPaused(job=self._config.name, paused=pause), Acknowledged)
        if pause or self.state is JobState.PAUSED:
            self._change(JobState.PAUSED if pause else JobState.RUNNING)
        return await self._report()

    @handles(jm.CancelJob)
    async def cancel(self, _: jm.CancelJob) -> jm.JobReport:
        if not self.state.over and self.state is not JobState.STOPPING:
            await self._scheduler.ask(RequestCheckpoint(job=self._config.name, stop=True), Acknowledged)
            self._change(JobState.STOPPING, _STOPPED)
        return await self._report()

    @handles(jm.CheckpointJob)
    @concurrent
    async def checkpoint(self, _: jm.CheckpointJob) -> jm.CheckpointReport:
        self._require(JobState.RUNNING, JobState.STOPPING, to="take a checkpoint")
        waiter: asyncio.Future[jm.CheckpointReport] = asyncio.get_running_loop().create_future()
        self._checkpoint_waiters.append((self._summary.steps, waiter))
        await self._scheduler.ask(RequestCheckpoint(job=self._config.name, stop=False), Acknowledged)
        try:
            async with asyncio.timeout(self._config.limits.checkpoint_timeout_s):
                return await asyncio.shield(waiter)
        except TimeoutError as error:
            raise NotPossible(f"no checkpoint within {self._config.limits.checkpoint_timeout_s} s") from error

    @handles(jm.JobStatus)
    @concurrent
    async def status(self, _: jm.JobStatus) -> jm.JobReport:
        return await self._report()

    def _require(self, *states: JobState, to: str) -> None:
        if self.state not in states:
            raise NotPossible(f"a job that is {self.state} cannot {to}")

    async def _report(self) -> jm.JobReport:
        waiting, quiet_s = "", 0.0
        if not self.state.over:
            try:
                progress = await self._scheduler.ask(QueryProgress(job=self._config.name), Progress)
                waiting, quiet_s = self._waiting_for or progress.waiting_for, progress.quiet_s
            except AskError as error:
                waiting = f"the scheduler: {error}"
        return jm.JobReport(
            job=self._config.name,
            state=self.state,
            step=self._summary.steps,
            steps=self._config.steps,
            reason=self._reason,
            waiting_for=waiting,
            quiet_s=quiet_s,
            checkpoint=self._checkpoint,
        )
