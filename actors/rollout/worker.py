"""The rollout worker: drives one engine for one job. Stateless: whatever it knows, the ledger knows too.

    scheduler ─ Assign, Revoke, PullVersion, Drain ─▶ handlers ─▶ generation.py: the engine's task ─▶ reports.py ─┐
        ▲                                                                                                         │
        └──── RegisterWorker, and TokenReport, WorkerVersion, AssignmentsFailed, Leaving through the outbox ───────┘

This file owns whom the worker obeys: its scheduler, its lease, the ruling term.

Invariants
- Commands of an older term are refused; one of a newer term voids what is held.
- It acts under a lease that its scheduler renews (``actors/core/tenure.py``). When that lapses it fences itself: it
  stops generating, forgets what it has not told, registers again and pulls.
- Without its scheduler the worker goes on, until its lease lapses, with what it holds, and remembers what comes of it.
  It offers itself again, with backoff, to whoever has its name and place now, and after ``orphan_grace_s`` it stops.
- Told to go with notice, it begins nothing more and goes on with what runs; who has nothing left goes early.
- Of several ranks (``rollout.tensor_parallel``) it is the first, and a rank that is lost ends it.
- Commands that overtake the answer to its offer are obeyed after it. There are few of them; a scheduler that sends
  more than ``early_commands`` is broken, and to drop one silently would lose its samples: the worker crashes.
"""

from __future__ import annotations

from actors.core.actor import Actor, handles
from actors.core.errors import AskError
from actors.core.ref import ActorRef
from actors.core.registered import RegisteredActor
from actors.core.tenure import RenewLease
from actors.core.terms import TermGuard
from actors.core.watch import Down
from actors.host.adapter import base_identity
from actors.host.host_memory import keep_freed_memory
from actors.protocol.failures import FailureKind
from actors.protocol.metrics import Event, Span, Spans
from actors.protocol.services import LookupService, ServiceFound
from actors.protocol.work import Assign, Drain, PullVersion, ReportsTaken, Revoke, SetAsleep
from actors.protocol.workers import Registered, RegisterWorker
from actors.ranks.group import GroupFollowers
from actors.roles import RoleArgs
from actors.rollout import kept_engine
from actors.rollout.engine import EngineSpec, GenerationRequest, RolloutEngine
from actors.rollout.engine_kinds import create_engine
from actors.rollout.errors import TooManyEarlyCommands
from actors.rollout.generation import Generation
from actors.rollout.reports import Reports, WentOn
from actors.rollout.worker_spec import engine_spec


def build(args: RoleArgs) -> dict[str, Actor]:
    """The actors of a rollout process. What a pull frees is kept for the next one."""
    keep_freed_memory(one_arena=False)
    return {args.name: RolloutWorker(args)}


Command = Assign | Revoke | PullVersion | SetAsleep
"""Messages that name the term under which they are said."""


class RolloutWorker(RegisteredActor):
    """See the module's docstring. ``engine``: a ready-made one instead of the job's kind (tests, simulations), which
    leads ``followers`` if it leads any.
    """

    def __init__(
        self, args: RoleArgs, engine: RolloutEngine | None = None, followers: GroupFollowers | None = None
    ) -> None:
        self._args = args
        self._job = args.job_config
        self._followers = followers or (GroupFollowers(args) if args.size > 1 else None)
        self._engine = engine or create_engine(self._job.rollout.engine, self._followers, self._job.limits)
        self._engine_spec: EngineSpec | None = None
        """What the engine was started with; None: it has not been."""
        self._terms = TermGuard()
        self._early: list[Command] = []
        """Commands of a scheduler whose answer to our offer is still on its way."""
        self._engine_start_s = 0.0
        self._draining = ""
        self._known = False
        """A scheduler has registered this life."""

    @property
    def _slots(self) -> int:
        return self._job.rollout.max_running

    @property
    def holds(self) -> int:
        """Samples and untold tokens, for those who look from outside whether it has fenced itself."""
        return self._reports.untold

    # ------------------------------------------------------------------ life

    async def on_start(self) -> None:
        if self._followers is not None:
            self._followers.connect(self.ctx)
        self.obey(self._args.scheduler)
        scheduler = self.ctx.ref(self.hub.address)
        spec = engine_spec(self._job, self._args.model_path)
        as_started = self._job.only_evaluates  # an engine that has served others has their weights
        kept = None if as_started else await kept_engine.take(self._engine.kind, spec)
        self._engine = kept or self._engine
        self._reports = Reports(self._job.name, self._args.name, self._terms, scheduler, self.ctx.limits, self.ctx.now)
        base = await self.ctx.run_blocking(base_identity, spec.model_path) if spec.adapter else ""
        self._generation = Generation(self.ctx, self._job, self._engine, self._reports, self._send_spans, base=base)
        self.ctx.start_task(self._pull_ahead(), "pull ahead")
        began_s = self.ctx.now()
        if kept is None:
            await self._engine.start(spec)
        self._engine_spec = spec
        self._engine_start_s = self.ctx.now() - began_s
        await self.register()
        self.ctx.start_task(self._generate(), "generate")

    async def _pull_ahead(self) -> None:
        """Fetch the version that will be needed while the engine is still starting.

        The scheduler says which: the weight server may hold one whose samples a crash could still take.
        """
        question = LookupService(job=self._job.name, role="weights")
        try:
            found = await self.ctx.ref(self.hub.address).ask(question, ServiceFound)
        except AskError as error:
            self.ctx.log.info("no version is pulled ahead; registering tells which", error=str(error))
            return
        if found.address is not None and found.policy_version >= 0:
            self._generation.want(found.policy_version, found.address)

    async def on_stop(self) -> None:
        self._generation.send_spans()  # of a short run, all that it has done
        self._generation.close()
        if self._engine_spec is None:
            await self._engine.close()
        else:
            await kept_engine.keep_or_close(self._engine, self._engine_spec)

    async def _generate(self) -> None:
        """Generate until the worker has been drained, and say goodbye."""
        await self._generation.run()
        self._reports.leave(self._draining)
        self._generation.send_spans()
        self.ctx.stop("preempted")

    def _send_spans(self, spans: list[Span]) -> None:
        self._metrics.tell(Spans(job=self._job.name, track=self._args.name, spans=spans))

    @property
    def _metrics(self) -> ActorRef:
        return self.ctx.ref(self.hub.beside(self._args.metrics))

    # ------------------------------------------------------------------ whom it obeys

    async def introduce(self, hub: ActorRef) -> None:
        self._early.clear()
        asked_at_s = self.ctx.now()
        answer = await hub.ask(self._offer(), Registered)
        self._granted, self._known = answer, True
        renewal = RenewLease(job=self._job.name, holder=self._args.name, lease=answer.lease)
        self.tenure.begin(hub, renewal, answer.lease_s, asked_at_s=asked_at_s)

    async def registered(self) -> None:
        answer = self._granted
        self._reports.meet(self.ctx.ref(self.hub.address))
        self._terms.admit(answer.term)
        went_on = self._reports.go_on(answer, self._generation.policy_version, self._generation.stats())
        self._generation.abort(sorted(went_on.void))
        self._tell(went_on)
        self._generation.want(answer.policy_version, answer.weights)
        for command in self._early:
            if not self._terms.is_stale(command.term):  # else who answers is the successor of who sent it
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
            holds=self._reports.known,
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

    def hub_lost(self, message: Down) -> None:
        if self._draining:  # what it would still generate, nobody would hear
            self._hand_back()
            return
        held = len(self._reports.held)
        self.ctx.log.warning("the scheduler is gone; going on without it", reason=message.reason, held=held)
        self._reports.lose()
        self._offer_again()

    def lease_lapsed(self) -> None:
        """Not confirmed for too long, or given up: what we hold is with others by now."""
        self.ctx.log.warning("the lease has lapsed; what is held is let go", samples=len(self._reports.held))
        self._fence()
        if self.is_registered and not self._draining:
            self._offer_again()

    def _fence(self) -> None:
        """Stop generating what was assigned, and forget what has not been told."""
        self._generation.abort(sorted(self._reports.forget()))

    def _offer_again(self) -> None:
        self._reports.hold_back()
        self.register_again()

    # ------------------------------------------------------------------ commands

    def _admit(self, command: Command) -> bool:
        """Whether a command is for us, and for now.

        Raises:
            StaleTerm: a newer scheduler rules; the command is dropped and counted.
            TooManyEarlyCommands: it comes before the answer to our offer, as have too many.
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
        if held + count > 2 * self._slots:  # credit may be exceeded by what has ended but is still on its way
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
        """Go: with notice as late as possible, else at once. The deadline holds even in a long step of the engine."""
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
