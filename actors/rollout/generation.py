"""The task that drives a rollout worker's engine, one step after the other.

    ┌─▶ apply commands ─▶ sleep or wake ─▶ load a pulled version ─▶ engine.step ────────────────────┐
    │                                                                └─ beside it: reports.deliver  │
    └──────── nothing to do, or reports are full: reports.deliver, then wait ◀──────────────────────┘

Invariants
- The engine is touched by this task alone (but for ``hurry``), so every command takes effect between two engine steps;
  a command ends a step of several tokens early.
- The output of a step is reported while the next one runs, so that the engine need not wait for it. It is reported
  before any other news of the engine, and before this task waits.
- Requests may come ahead of the version that they need; they wait here until it is loaded.
- The engine sleeps only while it holds nothing: requests that come although it is to sleep keep it awake, or wake it.
  While it sleeps, versions are pulled, but not loaded.
- An engine that raises, or whose step never ends, crashes the worker; a request that the engine refuses fails alone,
  as DATA.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from actors.core.context import Context
from actors.host.clock import time_of_day_s
from actors.protocol.failures import FailureKind
from actors.protocol.metrics import TraceSpan
from actors.protocol.work import EngineStats
from actors.rollout.engine import GenerationRequest, RolloutEngine, StepOutput
from actors.rollout.errors import RequestRefused, WeightsMismatch
from actors.rollout.puller import VersionPuller
from actors.rollout.reports import Reports
from actors.weights.client import PulledWeights
from configs.schema import JobConfig
from transport.address import ActorAddress

_SLEEP_LEVEL: Final = 1
"""Level of sleep at which the weights stay on the host: the engine may wake before there is a version to load."""

SpanArguments = dict[str, float | int | str]
Command = tuple[list[GenerationRequest], list[int], int]
"""Requests to add, assignments to abort, and the version that must be loaded before the requests are added."""


class Generation:
    """Generates for one worker; ``run`` it as a task. ``on_spans`` gets the engine's activities, for the trace."""

    def __init__(
        self,
        ctx: Context,
        job: JobConfig,
        engine: RolloutEngine,
        reports: Reports,
        on_spans: Callable[[list[TraceSpan]], None],
        *,
        base: str = "",
    ) -> None:
        """``base``: identity of the model for which versions are adapters; empty: versions are whole models."""
        self._ctx = ctx
        self._job = job
        self._engine = engine
        self._reports = reports
        self._on_spans = on_spans
        self._base = base
        self._puller = VersionPuller(
            ctx, job.name, self._version_ready, send_bytes_per_s=job.weights.send_bytes_per_s,
            on_trouble=lambda text: reports.trouble("weights_not_pulled", text),
        )  # fmt: skip
        self._commands: deque[Command] = deque()
        self._ahead: list[tuple[int, list[GenerationRequest]]] = []
        """(version, requests) for requests that wait until that version is loaded."""
        self._made: tuple[StepOutput, EngineStats] | None = None
        """Output of the last step until it is reported."""
        self._wake = asyncio.Event()
        self._to_sleep = self._asleep = self._answers = False
        self._ending = False
        self._idle_s = 0.0
        self._spans_sent_at = 0.0
        self._activity = ActivityLog(self._about)
        self._before = engine.stats()
        """Totals that the engine brought along from the job that it served before."""
        self._tokens_told = self._before.tokens_total
        """Number of the engine's tokens that spans have reported."""
        self.policy_version = 0 if job.only_evaluates else -1
        """Version that is loaded; -1: none yet. In a job that only evaluates, the engine starts with version 0."""

    # ------------------------------------------------------------ commands

    def add(self, requests: list[GenerationRequest], min_policy_version: int) -> None:
        """Generate ``requests``, once version ``min_policy_version`` is loaded."""
        self._command((requests, [], min_policy_version))

    def abort(self, names: list[int]) -> None:
        """End these assignments with the tokens that they have."""
        self._command(([], names, 0))

    def want(self, policy_version: int, weights: ActorAddress | None) -> None:
        """Pull the version while generating, and load it between two steps."""
        self._puller.want(policy_version, weights)

    def set_asleep(self, asleep: bool) -> None:
        """Let the engine sleep once it holds nothing, or wake it; the scheduler is told when that is done."""
        self._to_sleep, self._answers = asleep, True
        self._interrupt()

    def finish(self) -> None:
        """Let ``run`` return when nothing is left to do."""
        self._ending = True
        self._wake.set()

    def look(self) -> None:
        """Have ``run`` check again what there is to do, since something has changed outside."""
        self._wake.set()

    def _command(self, command: Command) -> None:
        self._commands.append(command)
        self._interrupt()

    def _interrupt(self) -> None:
        """Have ``run`` go on with the commands before the next token."""
        self._wake.set()
        self._engine.hurry()

    def stats(self) -> EngineStats:
        stats, before = self._engine.stats(), self._before
        return msgspec.structs.replace(
            stats,
            idle_s_total=self._idle_s,
            busy_s_total=stats.busy_s_total - before.busy_s_total,
            tokens_total=stats.tokens_total - before.tokens_total,
            prefilled_tokens_total=stats.prefilled_tokens_total - before.prefilled_tokens_total,
            prefix_hit_tokens_total=stats.prefix_hit_tokens_total - before.prefix_hit_tokens_total,
            preemptions_total=stats.preemptions_total - before.preemptions_total,
        )

    def close(self) -> None:
        self._puller.close()

    # ------------------------------------------------------------ the task

    async def run(self) -> None:
        """Generate until ``finish`` was called and all requests have ended."""
        while True:
            self._apply_commands()
            await self._sleep_or_wake()
            if not self._asleep and (pulled := self._puller.take()) is not None:
                await self._load(pulled)
            self._reports.flush()
            if self._engine.has_work and not self._reports.full:
                await self._step()
            elif self._ending and not self._commands and not self._engine.has_work:
                self._report_made()
                return
            else:
                self._report_made()
                await self._rest()
            if self._ctx.now() - self._spans_sent_at >= self._ctx.limits.span_interval_s:
                self.send_spans()

    async def _step(self) -> None:
        """Advance the engine, and meanwhile report the output of the step before."""
        self._activity.begin("generate")
        async with asyncio.timeout(self._ctx.limits.engine_step_s):
            reporting = asyncio.ensure_future(self._report_beside())  # begins when the step first waits
            try:
                output = await self._engine.step()
            finally:
                await reporting
        self._made = output, self.stats()

    async def _report_beside(self) -> None:
        self._report_made()

    def _report_made(self) -> None:
        if self._made is not None:
            made, self._made = self._made, None
            self._reports.deliver(*made)

    async def _sleep_or_wake(self) -> None:
        holds = self._engine.has_work or any(requests for _, requests in self._ahead)
        asleep = self._to_sleep and not holds
        if asleep != self._asleep:
            self._report_made()
            async with asyncio.timeout(self._ctx.limits.pull_timeout_s):
                await (self._engine.sleep(_SLEEP_LEVEL) if asleep else self._engine.wake())
            self._asleep = asleep
            self._activity.begin("asleep" if asleep else "idle")
        if self._answers and asleep == self._to_sleep:
            self._answers = False
            self._reports.asleep(asleep)

    def _apply_commands(self) -> None:
        while self._commands:
            requests, aborted, version = self._commands.popleft()
            if requests and version > self.policy_version:
                self._ahead.append((version, requests))
            elif requests:
                self._add(requests)
            if aborted:
                self._abort(aborted)

    def _abort(self, assignments: list[int]) -> None:
        """End ``assignments``; those that wait for a version are added first, so that the engine reports all ends."""
        gone = set(assignments)
        waiting = [request for _, requests in self._ahead for request in requests if request.request in gone]
        if waiting:
            self._ahead = [
                (version, [request for request in requests if request.request not in gone])
                for version, requests in self._ahead
            ]
            self._add(waiting)
        self._engine.abort(assignments)

    def _add_ahead(self) -> None:
        """Add the requests that have waited for the version that was just loaded."""
        ready = [requests for version, requests in self._ahead if version <= self.policy_version]
        self._ahead = [(version, requests) for version, requests in self._ahead if version > self.policy_version]
        for requests in ready:
            self._add(requests)

    def _add(self, requests: list[GenerationRequest]) -> None:
        try:
            self._engine.add(requests)
        except RequestRefused as error:
            self._reports.fail(list(error.requests), FailureKind.DATA, str(error))
            if rest := [request for request in requests if request.request not in error.requests]:
                self._add(rest)

    async def _rest(self) -> None:
        """Wait for something to do, at most until the next spans are due or a waiting report is worth another try."""
        self._activity.begin("asleep" if self._asleep else "idle")
        limits, started_s = self._ctx.limits, self._ctx.now()
        try:
            async with asyncio.timeout(limits.backoff_first_s if self._reports.waiting else limits.span_interval_s):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()
        if not self._asleep:
            self._idle_s += self._ctx.now() - started_s

    def _about(self, activity: str) -> SpanArguments:
        """Arguments of a span besides its version: the number of tokens generated, and the requests left."""
        if activity != "generate":
            return {}
        stats = self._engine.stats()
        made, self._tokens_told = stats.tokens_total - self._tokens_told, stats.tokens_total
        return {"tokens": made, "running": stats.running, "queued": stats.queued}

    def send_spans(self) -> None:
        self._spans_sent_at = self._ctx.now()
        if spans := self._activity.take():
            self._on_spans(spans)

    # ------------------------------------------------------------ weights

    def _version_ready(self, pull_s: float) -> None:
        self._activity.add("pull", pull_s)
        self._interrupt()

    async def _load(self, pulled: PulledWeights) -> None:
        """Swap to ``pulled`` between two steps.

        Raises:
            WeightsMismatch: it is an adapter, or a whole model, where the other is served; or of another model.
        """
        self._report_made()
        if pulled.adapter_of != self._base:
            raise WeightsMismatch(
                f"version {pulled.policy_version} is {_in_words(pulled.adapter_of)}, and this worker serves "
                f"{_in_words(self._base)}: model.path must hold the same files on every machine"
            )
        in_flight, began_s = self._job.rollout.in_flight, self._ctx.now()
        async with asyncio.timeout(self._ctx.limits.pull_timeout_s):
            await self._engine.load_weights(pulled.tensors, pulled.dtypes, pulled.policy_version, in_flight=in_flight)
        self.policy_version = pulled.policy_version
        self._activity.serve(pulled.policy_version)
        pulled.close()
        self._add_ahead()
        self._reports.version_loaded(pulled, self._ctx.now() - began_s)


def _in_words(base: str) -> str:
    return f"an adapter of the model with xxh3 {base}" if base else "a whole model"


class ActivityLog:
    """Records one activity at a time (idle, asleep, generate), in wall-clock seconds; equal neighbours become one span.

    ``about`` gives the arguments of an activity's span when the activity has just ended.
    """

    def __init__(
        self, about: Callable[[str], SpanArguments] = lambda _: {}, clock: Callable[[], float] = time_of_day_s
    ) -> None:
        self._about = about
        self._clock = clock
        self._name = ""
        self._since = 0.0
        self._version = -1
        self._spans: list[TraceSpan] = []

    def begin(self, name: str) -> None:
        """Begin the activity ``name``, which ends the present one."""
        if name != self._name:
            self._cut(self._clock())
            self._name = name

    def _cut(self, now: float) -> None:
        if self._name and now > self._since:
            span = self._span(self._name, self._since, now)
            span.args.update(self._about(self._name))
            self._spans.append(span)
        self._since = now

    def _span(self, name: str, start_s: float, end_s: float) -> TraceSpan:
        args: SpanArguments = {"version": self._version} if self._version >= 0 else {}
        return TraceSpan(name=name, start_s=start_s, end_s=end_s, args=args)

    def serve(self, version: int) -> None:
        """Note that the engine now has the weights of ``version``, with which step number ``version`` begins."""
        self._cut(self._clock())
        self._version = version

    def add(self, name: str, seconds: float) -> None:
        """Add a span for something that ran beside the activity, took ``seconds`` and has just ended."""
        now = self._clock()
        self._spans.append(self._span(name, now - seconds, now))

    def take(self) -> list[TraceSpan]:
        """Return all spans until now; the present activity is cut in two."""
        self._cut(self._clock())
        spans, self._spans = self._spans, []
        return spans
