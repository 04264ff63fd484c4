"""The rollout worker: drives one engine for one job. Stateless: whatever it knows, the ledger knows too.

    scheduler ─ Assign, Revoke, PullVersion, Drain ─▶ handlers ─▶ commands (queue) ─┐ wake
                                                                                    ▼
    generation task:   ┌─▶ apply commands ─▶ load a pulled version ─▶ engine.step ─▶ TokenDelta ─▶ scheduler
                       └──────────────── nothing to do: wait ◀──────────────────────────┘
    pull task:         fetch, verify while the engine generates ─▶ hand over ─▶ loaded between steps ─▶ WorkerVersion

Invariants
- The engine is touched by the generation task alone, so every command takes effect between two engine steps.
- Commands of an older epoch are refused.
- Work may come ahead of the version that it needs; it waits here until that is loaded.
- Each assignment ends in exactly one finished row or in one AssignmentsFailed, unless it is void: a scheduler that
  has lost us has given its samples to others, so nothing more is said about it.
- It acts under a lease that its scheduler renews (``actors/core/tenure.py``). When that lapses it fences itself: it
  stops generating, forgets what it has not told, registers again and pulls.
- Without its scheduler the worker goes on, until its lease lapses, with what it holds, and remembers what comes of it
  (``delta_log``, bounded). It offers itself again, with backoff, to whoever has its name and place now, and after
  ``orphan_grace_s`` it stops. The answer says with which samples it goes on, from where, and under which numbers; all
  others are void.
- A link that is merely full fills the outbox, and a full outbox stops the engine.
- An exception of the engine crashes the worker; a request that the engine refuses fails alone, as DATA.
"""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec
import numpy as np

from actors.core.actor import Actor, handles
from actors.core.epochs import EpochGuard
from actors.core.errors import AskError
from actors.core.leader import Leader
from actors.core.tenure import RenewLease, Tenure
from actors.core.watch import Down
from actors.metrics.messages import Event, Spans
from actors.roles import RoleArgs
from actors.rollout.delta_log import DeltaLog, Kept
from actors.rollout.engine import GenerationRequest, RolloutEngine, StepOutput
from actors.rollout.engine_kinds import create_engine
from actors.rollout.engines.step_columns import without_requests
from actors.rollout.errors import RequestRefused
from actors.rollout.messages import Assign, Drain, PullVersion, Revoke
from actors.rollout.outbox import Outbox
from actors.rollout.puller import VersionPuller
from actors.rollout.spans import ActivityLog
from actors.rollout.worker_spec import engine_spec
from actors.scheduler.messages import (
    AssignmentsFailed,
    Failure,
    FailureKind,
    FinishReason,
    Leaving,
    Registered,
    RegisterWorker,
    TokenDelta,
    WorkerVersion,
)
from actors.weights.client import PulledWeights

Command = tuple[list[GenerationRequest], list[int], int]
"""Requests to add once the third, a version, is loaded; then assignments to abort."""


def build(args: RoleArgs) -> dict[str, Actor]:
    """The actors of a rollout process."""
    return {args.name: RolloutWorker(args)}


class RolloutWorker(Actor):
    """See the module's docstring. ``engine``: a ready-made one instead of the job's kind (tests, simulations)."""

    def __init__(self, args: RoleArgs, engine: RolloutEngine | None = None) -> None:
        self._args = args
        self._job = args.job_config
        self._engine = engine or create_engine(self._job.rollout.engine)
        self._epochs = EpochGuard()
        self._commands: deque[Command] = deque()
        self._held: set[int] = set()
        """Assignments that have not ended."""
        self._ahead: list[tuple[int, list[GenerationRequest]]] = []
        """Requests that wait for a version that is not loaded yet, under that version."""
        self._void: set[int] = set()
        """Assignments that nobody waits for any more; the engine has yet to end them."""
        self._numbers: dict[int, int] = {}
        """The engine's name of an assignment → its present number, of those that have outlived their scheduler."""
        self._early: list[Assign | Revoke | PullVersion] = []
        """Commands of a scheduler whose answer to our offer is still on its way."""
        self._wake = asyncio.Event()
        self._policy_version = -1
        self._draining = ""
        self._registering = False
        self._known = False
        """A scheduler has registered this life."""
        self._sequence = 0
        self._idle_s = 0.0
        self._spans_sent_at = 0.0
        self._activity = ActivityLog()

    @property
    def _slots(self) -> int:
        return self._job.rollout.max_running

    # ------------------------------------------------------------------ life

    async def on_start(self) -> None:
        self._puller = VersionPuller(self.ctx, self._job.name, self._version_ready)
        self._leader = Leader(self.ctx, self._args.scheduler)
        self._tenure = Tenure(self.ctx, self._lease_lapsed)
        limits = self.ctx.limits
        self._log = DeltaLog(limits.replay_tokens, limits.orphan_tokens)
        self._outbox = Outbox(self.ctx.ref(self._leader.address), self.ctx.limits.outbox_messages)
        await self._engine.start(engine_spec(self._job, self._args.model_path))
        self._registering = True
        await self._register()
        self.ctx.start_task(self._generate(), "generate")

    async def on_stop(self) -> None:
        self._puller.close()
        await self._engine.close()

    async def _register(self) -> None:
        """Offer ourselves until the scheduler answers, with backoff.

        Raises:
            AskError: the last failure, after ``orphan_grace_s`` without an answer.
        """
        limits, delay_s = self.ctx.limits, self.ctx.limits.backoff_first_s
        give_up_at = self.ctx.now() + limits.orphan_grace_s
        while True:
            self._early.clear()
            try:
                scheduler = self.ctx.ref(await self._leader.find())
                asked_at_s = self.ctx.now()
                answer = await scheduler.ask(self._offer(), Registered)
                break
            except AskError as error:
                if self.ctx.now() + delay_s > give_up_at:
                    raise
                self.ctx.log.warning("the scheduler does not answer; trying again", error=str(error), delay_s=delay_s)
            await self.ctx.sleep(delay_s * self.ctx.rng("backoff").uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, limits.backoff_max_s)
        self._registering, self._known = False, True
        renewal = RenewLease(job=self._job.name, holder=self._args.name, lease=answer.lease)
        self._tenure.begin(scheduler, renewal, answer.lease_s, asked_at_s=asked_at_s)
        self.ctx.watch(scheduler.address)
        self._outbox.target = scheduler
        self._outbox.held_back = False
        self._epochs.admit(answer.epoch)
        self._go_on(answer)
        self._puller.want(answer.policy_version, answer.weights)
        for command in self._early:
            await self._obey(command)
        self._early.clear()
        self._wake.set()

    def _offer(self) -> RegisterWorker:
        holds = self._log.assignments().union(self._numbers.get(name, name) for name in self._held)
        return RegisterWorker(
            job=self._job.name,
            worker=self.ctx.self_address,
            node=self._args.node,
            engine=self._engine.kind,
            slots=self._slots,
            policy_version=self._policy_version,
            again=self._known,
            holds=np.array(sorted(holds), np.int64),
        )

    def _go_on(self, answer: Registered) -> None:
        """With what the scheduler has taken up; say what it lacks of that, and forget the rest."""
        columns = (answer.kept.tolist(), answer.numbers.tolist(), answer.lengths.tolist())
        kept = {former: Kept(number, length) for former, number, length in zip(*columns, strict=True)}
        former = {name: self._numbers.get(name, name) for name in self._held}
        self._void_some({name for name, number in former.items() if number not in kept})
        self._numbers = {name: kept[former[name]].number for name in self._held}
        deltas = self._log.continuation(kept, answer.epoch)
        unheard = self._log.unheard_tokens
        self._log.clear()
        open_ = {has.number: has.length for has in kept.values()}
        for delta in deltas:
            columns = (delta.assignments.tolist(), (delta.offsets + delta.counts).tolist(), delta.finished.tolist())
            for number, end, finished in zip(*columns, strict=True):
                open_[number] = end
                if finished:
                    del open_[number]
        if lost := {number: at for number, at in open_.items() if number not in self._numbers.values()}:
            deltas.append(self._handed_back(lost))
        for delta in deltas:
            self._say(msgspec.structs.replace(delta, sequence=self._sequence))
        if kept or unheard:
            tokens = sum(len(delta.tokens) for delta in deltas)
            fields = {"worker": self._args.name, "samples": len(kept), "tokens": tokens, "generated_alone": unheard}
            event = Event(job=self._job.name, name="worker_went_on", fields=fields)
            self.ctx.ref(self._leader.beside(self._args.metrics)).tell(event)

    def _handed_back(self, lost: dict[int, int]) -> TokenDelta:
        """These numbers, each with its length, have ended here, and how is not remembered."""
        n = len(lost)
        return self._delta(
            StepOutput(
                policy_version=self._policy_version,
                requests=np.array(list(lost), np.int64),
                offsets=np.array(list(lost.values()), np.int32),
                counts=np.zeros(n, np.int32),
                finished=np.full(n, FinishReason.ABORTED, np.uint8),
                tokens=np.empty(0, np.int32),
                logprobs=np.empty(0, np.float32),
                step_s=0.0,
            )
        )

    def _void_some(self, names: set[int]) -> None:
        """Nobody waits for these: they have been given to others, or will be."""
        self._void |= names
        self._held -= names
        self._commands.append(([], sorted(names), 0))
        self._wake.set()

    @handles(Down)
    async def scheduler_down(self, message: Down) -> None:
        if self._registering or self._draining or message.address != self._leader.address:
            return
        self.ctx.log.warning("the scheduler is gone; going on without it", reason=message.reason, held=len(self._held))
        self._outbox.retain(WorkerVersion)
        self._log.lose()
        self._offer_again()

    def _lease_lapsed(self) -> None:
        """Not confirmed for too long, or given up: what we hold is with others by now."""
        self.ctx.log.warning("the lease has lapsed; what is held is let go", samples=len(self._held))
        self._fence()
        if not self._registering and not self._draining:
            self._offer_again()

    def _fence(self) -> None:
        """Stop generating what was assigned, and forget what has not been told."""
        self._let_go()

    def _let_go(self) -> None:
        self._outbox.retain(WorkerVersion)
        self._log.clear()
        self._void_some(set(self._held))
        self._numbers.clear()

    def _offer_again(self) -> None:
        self._registering = self._outbox.held_back = True
        self.ctx.start_task(self._register_or_stop(), "register")

    @property
    def holds(self) -> int:
        """Samples and untold tokens, for those who look from outside whether it has fenced itself."""
        unheard = self._log.unheard_tokens if self._log.orphaned else 0
        return len(self._held) + self._outbox.waiting(TokenDelta) + unheard

    async def _register_or_stop(self) -> None:
        try:
            await self._register()
        except AskError as error:
            self.ctx.log.error("the scheduler stays away; stopping", error=str(error))
            self.ctx.stop("orphaned")

    # ------------------------------------------------------------------ commands

    def _admit(self, command: Assign | Revoke | PullVersion) -> bool:
        """Whether a command is for us, and for now.

        Raises:
            StaleEpoch: a newer scheduler rules; the command is dropped and counted.
        """
        if command.job != self._job.name:
            self.ctx.log.warning("a command of another job", job=command.job)
            return False
        if self._registering and not self._epochs.is_stale(command.epoch):
            self._early.append(command)
            return False
        if self._epochs.admit(command.epoch):
            self._let_go()
        return True

    async def _obey(self, command: Assign | Revoke | PullVersion) -> None:
        if isinstance(command, Assign):
            await self.assign(command)
        elif isinstance(command, Revoke):
            await self.revoke(command)
        else:
            await self.pull_version(command)

    @handles(Assign)
    async def assign(self, message: Assign) -> None:
        if not self._admit(message):
            return
        requests = [
            GenerationRequest(
                request=sample.assignment,
                prompt=work.prompt,
                sibling=sample.sibling,
                prompt_ids=work.prompt_ids,
                generated=sample.generated,
                sampling=message.sampling,
            )
            for work in message.work
            for sample in work.samples
        ]
        if refusal := self._refusal(message, len(requests)):
            self._fail([request.request for request in requests], FailureKind.INFRASTRUCTURE, refusal)
            return
        self._held.update(request.request for request in requests)
        self._commands.append((requests, [], message.min_policy_version))
        self._wake.set()

    def _refusal(self, message: Assign, count: int) -> str:
        if self._draining:
            return f"the worker is leaving ({self._draining})"
        if (
            len(self._held) + count > 2 * self._slots
        ):  # credit may be exceeded by what has ended but is still on its way
            return f"{len(self._held)} samples are held and {count} more offered: the worker has {self._slots} slots"
        return ""

    @handles(Revoke)
    async def revoke(self, message: Revoke) -> None:
        if self._admit(message):
            names = {number: name for name, number in self._numbers.items()}
            numbers: list[int] = message.assignments.tolist()
            self._commands.append(([], [names.get(number, number) for number in numbers], 0))
            self._wake.set()

    @handles(PullVersion)
    async def pull_version(self, message: PullVersion) -> None:
        if self._admit(message):
            self._puller.want(message.policy_version, message.weights)

    @handles(Drain)
    async def drain(self, message: Drain) -> None:
        """Hand everything back and go. The deadline holds even if the engine is in a long step."""
        if message.job != self._job.name or self._draining:
            return
        self._draining = message.reason or "drained"
        self._commands.append(([], sorted(self._held), 0))
        self._wake.set()
        self.ctx.start_task(self._stop_after(message.deadline_s), "drain deadline")

    async def _stop_after(self, deadline_s: float) -> None:
        await self.ctx.sleep(deadline_s)
        self.ctx.stop("preempted")

    def _fail(self, assignments: list[int], kind: FailureKind, why: str) -> None:
        failure = Failure(kind=kind, message=why, where=self._args.name)
        message = AssignmentsFailed(
            job=self._job.name,
            worker=self._args.name,
            assignments=self._numbered(np.array(assignments, np.int64)),
            failure=failure,
        )
        self._held.difference_update(assignments)
        self._outbox.send(message)

    # ------------------------------------------------------------------ generation

    async def _generate(self) -> None:
        while True:
            self._apply_commands()
            if (pulled := self._puller.take()) is not None:
                await self._load(pulled)
            self._outbox.flush()
            if self._engine.has_work and not self._outbox.full and not self._log.full:
                self._activity.begin("generate")
                async with asyncio.timeout(self.ctx.limits.engine_step_s):
                    output = await self._engine.step()
                self._deliver(output)
            elif self._draining and not self._commands and not self._engine.has_work:
                self._leave()
                return
            else:
                await self._rest()
            if self.ctx.now() - self._spans_sent_at >= self.ctx.limits.span_interval_s:
                self._send_spans()

    def _apply_commands(self) -> None:
        while self._commands:
            requests, aborted, version = self._commands.popleft()
            if requests and version > self._policy_version:
                self._ahead.append((version, requests))
            elif requests:
                self._add(requests)
            if aborted:
                self._abort(aborted)

    def _abort(self, assignments: list[int]) -> None:
        """End ``assignments``; the engine says so, also of those that it would have got later."""
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
        """Begin what has waited for the version that was just loaded."""
        ready = [requests for version, requests in self._ahead if version <= self._policy_version]
        self._ahead = [(version, requests) for version, requests in self._ahead if version > self._policy_version]
        for requests in ready:
            self._add(requests)

    def _add(self, requests: list[GenerationRequest]) -> None:
        try:
            self._engine.add(requests)
        except RequestRefused as error:
            self._fail(list(error.requests), FailureKind.DATA, str(error))
            if rest := [request for request in requests if request.request not in error.requests]:
                self._add(rest)

    def _deliver(self, output: StepOutput) -> None:
        if self._void:
            ended = output.requests[output.finished != FinishReason.RUNNING].tolist()
            output = without_requests(output, self._void)
            self._void.difference_update(ended)
        if not len(output.requests):
            return
        self._say(self._delta(output))
        over = output.requests[output.finished != FinishReason.RUNNING].tolist()
        self._held.difference_update(over)
        for name in over if self._numbers else ():
            self._numbers.pop(name, None)

    def _delta(self, output: StepOutput) -> TokenDelta:
        return TokenDelta(
            job=self._job.name,
            worker=self._args.name,
            epoch=self._epochs.ruling,
            sequence=self._sequence,
            policy_version=output.policy_version,
            assignments=self._numbered(output.requests),
            offsets=output.offsets,
            counts=output.counts,
            finished=output.finished,
            tokens=output.tokens,
            logprobs=output.logprobs,
            stats=msgspec.structs.replace(self._engine.stats(), idle_s_total=self._idle_s),
        )

    def _numbered(self, names: np.ndarray) -> np.ndarray:
        """The present numbers of assignments that the engine calls ``names``."""
        if not self._numbers:
            return names
        return np.array([self._numbers.get(name, name) for name in names.tolist()], np.int64)

    def _say(self, delta: TokenDelta) -> None:
        """Now, or when there is a scheduler again."""
        self._log.add(delta)
        if not self._log.orphaned:
            self._sequence += 1
            self._outbox.send(delta)

    async def _rest(self) -> None:
        """Wait for something to do; at most until the next spans are due or a held-back delta is worth another try."""
        self._activity.begin("idle")
        limits, started_s = self.ctx.limits, self.ctx.now()
        try:
            async with asyncio.timeout(limits.backoff_first_s if len(self._outbox) else limits.span_interval_s):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()
        self._idle_s += self.ctx.now() - started_s

    def _leave(self) -> None:
        self._outbox.send(Leaving(job=self._job.name, worker=self._args.name, reason=self._draining))
        self._send_spans()
        self.ctx.stop("preempted")

    def _send_spans(self) -> None:
        self._spans_sent_at = self.ctx.now()
        if spans := self._activity.take():
            metrics = self._leader.beside(self._args.metrics)
            self.ctx.ref(metrics).tell(Spans(job=self._job.name, track=self._args.name, spans=spans))

    # ------------------------------------------------------------------ weights

    def _version_ready(self, pull_s: float) -> None:
        self._activity.add("pull", pull_s)
        self._wake.set()

    async def _load(self, pulled: PulledWeights) -> None:
        """Swap to ``pulled`` between two steps."""
        in_flight = self._job.rollout.in_flight
        async with asyncio.timeout(self.ctx.limits.pull_timeout_s):
            await self._engine.load_weights(pulled.tensors, pulled.dtypes, pulled.policy_version, in_flight=in_flight)
        self._policy_version = pulled.policy_version
        pulled.close()
        self._add_ahead()
        self._outbox.send(
            WorkerVersion(
                job=self._job.name,
                worker=self._args.name,
                policy_version=pulled.policy_version,
                pull_s=pulled.seconds,
                pull_bytes=pulled.bytes,
            )
        )
