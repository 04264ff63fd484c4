"""The rollout worker drives one engine for one job. It can be lost at any time: the ledger has all that matters.

    scheduler ─ Assign, Revoke, PullVersion, Drain ─▶ handlers ─▶ generation.py: the engine's task ─▶ reports.py ─┐
        ▲                                                                                                         │
        └──── RegisterWorker, and TokenReport, WorkerVersion, AssignmentsFailed, Leaving through the outbox ───────┘

This file decides which scheduler the worker obeys: by its address, the worker's lease and the ruling term.

Invariants
- Commands of an older term are refused; one of a newer term voids what is held.
- It acts under a lease that its scheduler renews (``actors/core/tenure.py``). When the lease lapses the worker fences
  itself: it stops generating, forgets unsent tokens, registers again and pulls.
- Without its scheduler the worker generates on until its lease lapses, and remembers the tokens. It offers itself
  again, with backoff, to the scheduler's present address, and after ``orphan_grace_s`` it stops.
- Told to leave with notice, it begins nothing new and continues its samples; when none is left it leaves early.
- If its engine has several ranks (``rollout.tensor_parallel``), it is the first, and the loss of a rank ends it.
- Commands that overtake the answer to its offer are obeyed after the answer. If a scheduler sends more of them than
  ``early_commands``, it is broken, and the worker crashes: dropping a command silently would lose its samples.
"""

from __future__ import annotations

from typing import Final

from actors.core.actor import Actor, handles
from actors.core.errors import AskError
from actors.core.ref import ActorRef
from actors.core.registered import RegisteredActor
from actors.core.tenure import RenewLease
from actors.core.terms import TermGuard
from actors.core.watch import Down
from actors.host.host_memory import keep_freed_memory
from actors.models.adapter import base_identity
from actors.protocol.failures import FailureKind
from actors.protocol.metrics import Event, Spans, TraceSpan
from actors.protocol.services import LookupService, ServiceFound
from actors.protocol.work import Assign, Drain, PullVersion, ReportsTaken, Revoke, SetAsleep
from actors.protocol.workers import Registered, RegisterWorker
from actors.ranks.group import GroupFollowers
from actors.roles import RoleArgs
from actors.rollout import kept_engine
from actors.rollout.engine import EngineSpec, GenerationRequest, RolloutEngine
from actors.rollout.engine_kinds import create_engine
from actors.rollout.errors import EngineUnavailable, ServerGone, TooManyEarlyCommands
from actors.rollout.generation import Generation
from actors.rollout.reports import Reports, WentOn
from actors.rollout.worker_spec import engine_kind, engine_spec


def build(args: RoleArgs) -> dict[str, Actor]:
    """The actors of a rollout process. The process keeps the memory that a pull frees, for the next pull."""
    keep_freed_memory(one_arena=False)
    return {args.name: RolloutWorker(args)}


_LOOK_S: Final = 1.0
"""Pause between two starts of an engine whose server is away; each waits for it, ``limits.server_start_s``."""
Command = Assign | Revoke | PullVersion | SetAsleep
"""Messages that name the term in which they are given."""


class RolloutWorker(RegisteredActor):
    """Drives one engine for one job; see the module's docstring.

    ``engine``: used instead of one of the job's kind (tests, simulations); ``followers``: the ranks that it leads.
    """

    def __init__(
        self, args: RoleArgs, engine: RolloutEngine | None = None, followers: GroupFollowers | None = None
    ) -> None:
        self._args = args
        self._job = args.job_config
        self._followers = followers or (GroupFollowers(args) if args.size > 1 else None)
        self._engine = engine or create_engine(engine_kind(self._job, args.name), self._followers, self._job.limits)
        self._engine_spec: EngineSpec | None = None
        """Spec with which the engine was started; None before that."""
        self._terms = TermGuard()
        self._early: list[Command] = []
        """Commands of a scheduler whose answer to our offer is still on its way."""
        self._engine_start_s = 0.0
        self._draining = ""
        self._known = False
        """Whether a scheduler has registered this life of the worker."""

    @property
    def _slots(self) -> int:
        return self._engine.slots

    @property
    def holds(self) -> int:
        """Number of samples and unsent tokens, for checks that the worker has fenced itself."""
        return self._reports.untold

    # ------------------------------------------------------------------ life

    async def on_start(self) -> None:
        if self._followers is not None:
            self._followers.connect(self.ctx)
        self.obey(self._args.scheduler)
        scheduler = self.ctx.ref(self.scheduler.address)
        spec = engine_spec(self._job, self._args.model_path, self._args.name)
        as_started = self._job.only_evaluates  # then nobody publishes weights, and a kept engine has none
        kept = None if as_started else await kept_engine.take(self._engine.kind, spec)
        self._engine = kept or self._engine
        self._reports = Reports(self._job.name, self._args.name, self._terms, scheduler, self.ctx.limits, self.ctx.now)
        base = await self.ctx.run_blocking(base_identity, spec.model_path) if spec.adapter else ""
        self._generation = Generation(self.ctx, self._job, self._engine, self._reports, self._send_spans, base=base)
        self.ctx.start_task(self._pull_ahead(), "pull ahead")
        began_s = self.ctx.now()
        try:
            if kept is None:
                await self._engine.start(spec)
        except ServerGone as error:
            self.ctx.log.warning("the server is waited for", error=str(error))
            self.ctx.start_task(self._wait_for_server(spec, began_s), "wait for the server")
        else:
            await self._begin(spec, began_s)

    async def _wait_for_server(self, spec: EngineSpec, began_s: float) -> None:
        """Start the engine again until its server is there: that is no failed start, however many servers are away.

        Raises:
            EngineUnavailable: it was away for ``limits.server_absence_s``.
        """
        while not self._draining:
            await self.ctx.sleep(_LOOK_S)
            try:
                await self._engine.start(spec)
                await self._begin(spec, began_s)
                return
            except ServerGone as error:
                waited_s = self.ctx.now() - began_s
                if waited_s >= self.ctx.limits.server_absence_s:
                    raise EngineUnavailable(
                        f"{error}. Waited for {waited_s:.0f} s (limits.server_absence_s)"
                    ) from error
                self.ctx.log.warning("the server is waited for", waited_s=round(waited_s), error=str(error))
        self.ctx.stop("preempted")

    async def _begin(self, spec: EngineSpec, began_s: float) -> None:
        self._engine_spec = spec
        self._engine_start_s = self.ctx.now() - began_s
        await self.register()
        self.ctx.start_task(self._generate(), "generate")

    async def _pull_ahead(self) -> None:
        """Fetch the version that will be needed, while the engine is still starting.

        The scheduler says which: the weight server may have a newer one, whose step is not durable yet.
        """
        question = LookupService(job=self._job.name, role="weights")
        try:
            found = await self.ctx.ref(self.scheduler.address).ask(question, ServiceFound)
        except AskError as error:
            self.ctx.log.info("no version is pulled ahead; registering tells which", error=str(error))
            return
        if found.address is not None and found.policy_version >= 0:
            self._generation.want(found.policy_version, found.address)

    async def on_stop(self) -> None:
        self._generation.send_spans()  # in a short run these are all spans
        self._generation.close()
        if self._engine_spec is None:
            await self._engine.close()
        else:
            await kept_engine.keep_or_close(self._engine, self._engine_spec)

    async def _generate(self) -> None:
        """Generate until the worker has been drained, and say goodbye.

        A server that is gone takes its worker along: no crash, so no sample of the worker's is suspected of it.
        """
        try:
            await self._generation.run()
        except ServerGone as error:
            self.ctx.log.warning("the server is gone", error=str(error))
            self.ctx.stop("preempted")
            return
        self._reports.leave(self._draining)
        self._generation.send_spans()
        self.ctx.stop("preempted")

    def _send_spans(self, spans: list[TraceSpan]) -> None:
        self._metrics.tell(Spans(job=self._job.name, track=self._args.name, spans=spans))

    @property
    def _metrics(self) -> ActorRef:
        return self.ctx.ref(self.scheduler.beside(self._args.metrics))

    # ------------------------------------------------------------------ whom it obeys

    async def introduce(self, scheduler: ActorRef) -> None:
        self._early.clear()
        asked_at_s = self.ctx.now()
        answer = await scheduler.ask(self._offer(), Registered)
        self._granted, self._known = answer, True
        renewal = RenewLease(job=self._job.name, holder=self._args.name, lease=answer.lease)
        self.tenure.begin(scheduler, renewal, answer.lease_s, asked_at_s=asked_at_s)

    async def registered(self) -> None:
        answer = self._granted
        self._reports.meet(self.ctx.ref(self.scheduler.address))
        self._terms.admit(answer.term)
        went_on = self._reports.go_on(answer, self._generation.policy_version, self._generation.stats())
        self._generation.abort(sorted(went_on.void))
        self._tell(went_on)
        self._generation.want(answer.policy_version, answer.weights)
        for command in self._early:
            if not self._terms.is_stale(command.term):  # a stale one came from the predecessor of the one that answered
                await self._obey(command)
        self._early.clear()
        self._generation.look()

    def _offer(self) -> RegisterWorker:
        return RegisterWorker(
            job=self._job.name,
            worker=self.ctx.self_address,
            node=self._args.node,
            engine=self._engine.kind,
            slots=self._slots,
            policy_version=self._generation.policy_version,
            again=self._known,
            engine_start_s=self._engine_start_s,
            beside_trainer=self._args.beside_trainer,
            holds=self._reports.resumable,
        )

    def _tell(self, went_on: WentOn) -> None:
        if went_on.samples or went_on.generated_alone:
            fields = {"worker": self._args.name, "samples": went_on.samples, "tokens": went_on.tokens}
            fields["generated_alone"] = went_on.generated_alone
            self._metrics.tell(Event(job=self._job.name, name="worker_went_on", fields=fields))

    @handles(Down)
    async def down(self, message: Down) -> None:
        if self._followers is not None:
            self._followers.heard(message)
        await super().down(message)

    def scheduler_lost(self, message: Down) -> None:
        if self._draining:  # nobody would get the tokens that it could still generate
            self._hand_back()
            return
        held = len(self._reports.held)
        self.ctx.log.warning("the scheduler is gone; going on without it", reason=message.reason, held=held)
        self._reports.lose()
        self._offer_again()

    def lease_lapsed(self) -> None:
        """Drop all samples: the scheduler has given them to other workers by now, or will."""
        self.ctx.log.warning("the lease has lapsed; what is held is let go", samples=len(self._reports.held))
        self._fence()
        if self.is_registered and not self._draining:
            self._offer_again()

    def _fence(self) -> None:
        """Stop generating all assignments, and forget tokens that have not been sent."""
        self._generation.abort(sorted(self._reports.forget()))

    def _offer_again(self) -> None:
        self._reports.hold_back()
        self.register_again()

    # ------------------------------------------------------------------ commands

    def _admit(self, command: Command) -> bool:
        """Whether a command is to be obeyed now.

        Raises:
            StaleTerm: a newer scheduler rules; the command is dropped and counted.
            TooManyEarlyCommands: it comes before the answer to our offer, and too many commands wait for that already.
        """
        if command.job != self._job.name:
            self.ctx.log.warning("a command of another job", job=command.job)
            return False
        if not self.is_registered and not self._terms.is_stale(command.term):
            if len(self._early) >= self.ctx.limits.early_commands:
                raise TooManyEarlyCommands(len(self._early))
            self._early.append(command)
            return False
        if self._terms.admit(command.term):
            self._fence()
        return True

    async def _obey(self, command: Command) -> None:
        if isinstance(command, Assign):
            await self.assign(command)
        elif isinstance(command, Revoke):
            await self.revoke(command)
        elif isinstance(command, SetAsleep):
            await self.set_asleep(command)
        else:
            await self.pull_version(command)

    @handles(Assign)
    async def assign(self, message: Assign) -> None:
        if not self._admit(message):
            return
        requests = _requests(message)
        names = [request.request for request in requests]
        if refusal := self._refusal(len(requests)):
            self._reports.fail(names, FailureKind.INFRASTRUCTURE, refusal)
            return
        self._reports.hold(names)
        self._generation.add(requests, message.min_policy_version)

    def _refusal(self, count: int) -> str:
        if self._draining:
            return f"the worker is leaving ({self._draining})"
        held = len(self._reports.held)
        if held + count > 2 * self._slots:  # the scheduler may count samples as ended that we still hold
            return f"{held} samples are held and {count} more offered: the worker has {self._slots} slots"
        return ""

    @handles(Revoke)
    async def revoke(self, message: Revoke) -> None:
        if self._admit(message):
            self._generation.abort(self._reports.names(message.assignments.tolist()))

    @handles(PullVersion)
    async def pull_version(self, message: PullVersion) -> None:
        if self._admit(message):
            self._generation.want(message.policy_version, message.weights)

    @handles(SetAsleep)
    async def set_asleep(self, message: SetAsleep) -> None:
        if self._admit(message):
            self._generation.set_asleep(message.asleep)

    @handles(ReportsTaken)
    async def reports_taken(self, message: ReportsTaken) -> None:
        if message.job == self._job.name:
            self._reports.taken(message.term, message.sequence)
            self._generation.look()

    @handles(Drain)
    async def drain(self, message: Drain) -> None:
        """Leave: with notice as late as possible, else at once. The deadline holds even in a long engine step."""
        if message.job != self._job.name:
            return
        self._draining = self._draining or message.reason or "drained"
        keeps_s = message.deadline_s - self.ctx.limits.hand_over_s / 2  # the scheduler takes it back a little earlier
        if message.notice and keeps_s > 0:
            self._reports.drain(self._draining, message.deadline_s)
            self._generation.finish()
            self.ctx.start_task(self._hand_back_after(keeps_s), "end of notice")
        else:
            self._hand_back()
        self.ctx.start_task(self._stop_after(message.deadline_s), "drain deadline")

    def _hand_back(self) -> None:
        self._generation.abort(sorted(self._reports.held))
        self._generation.finish()

    async def _hand_back_after(self, seconds: float) -> None:
        await self.ctx.sleep(seconds)
        self._hand_back()

    async def _stop_after(self, deadline_s: float) -> None:
        await self.ctx.sleep(deadline_s)
        self.ctx.stop("preempted")


def _requests(message: Assign) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request=sample.assignment,
            prompt=work.prompt,
            sibling=sample.sibling,
            prompt_ids=work.prompt_ids,
            generated=sample.generated,
            sampling=message.sampling,
            first=sample.first,
            limit=sample.limit,
        )
        for work in message.work
        for sample in work.samples
    ]
