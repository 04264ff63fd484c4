"""The supervisor: starts children to *ready*, hears how they end, and does what its strategy and budget say.

    end of a child ─▶ cause ─▶ strategies.decide ─▶ budget ─▶ backoff ─▶ stop siblings in reverse, start in order
                                                       └ exceeded, or a permanent error ─▶ stop all, SupervisorGaveUp

Invariants
- Every end of a child is judged exactly once: an end that we asked for is not judged at all.
- Under one_for_all and rest_for_one one recovery runs at a time, and so in each group of one_for_one; what ends
  meanwhile joins the next round (``recovery.py``).
- A group's failures are counted as one child's: its recovery costs one unit of budget, and its lives are one row.
- A child that was never ready is tried ``start_attempts_max`` times in a row, whatever the budget still holds. A start
  that a node agent did not answer says nothing of the child: it is not among them. It costs a pause, and all of them
  on one node cost one unit of budget.
- A crash loop ends, however seldom it turns, and a permanent error is met once (``judgement.py``).
- A cut-off node costs one unit of budget, however many children it had, and only after it had the grace to come back.
- All time is the context's clock, all randomness the context's generator.

Consumes: Down, ProcessExited.  Produces: events to ``on_event``.  Waits for: starts and stops, each with a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from actors.core.actor import Actor, handles
from actors.core.watch import Down, Gone
from configs.limits import Limits
from supervisors.tree.child_record import Child, ChildInfo, SupervisionEvent
from supervisors.tree.children import ChildSpec, Running
from supervisors.tree.errors import SupervisorGaveUp
from supervisors.tree.judgement import End, Judge, end_of_actor, end_of_process, end_of_start
from supervisors.tree.messages import ProcessExited
from supervisors.tree.node_loss import still_has
from supervisors.tree.recovery import Recovery, Rounds
from supervisors.tree.restart_budget import Backoff, BackoffPolicy, ExitCause, counts
from supervisors.tree.strategies import Strategy, decide, reach
from transport.address import ActorAddress

__all__ = ["SupervisionEvent", "Supervisor"]


class Supervisor(Actor):
    """Supervises ``children`` in their order. Create it, spawn it, then await ``ready``."""

    def __init__(
        self,
        name: str,
        strategy: Strategy,
        children: Sequence[ChildSpec],
        *,
        on_event: Callable[[SupervisionEvent], None] | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Args:
        limits: budget, attempts, backoff and grace, of the job whose children these are; default: those of the
            process. A head that serves jobs was not started with the limits of any of them.
        """
        self._name = name
        self._strategy = strategy
        self._specs = list(children)
        self._on_event = on_event
        self._together = strategy is Strategy.ONE_FOR_ONE  # such children do not lean on each other
        self._given_limits = limits
        self._children: dict[str, Child] = {}
        self._ending = False
        self._restarts = 0
        self._early_exits: dict[tuple[str, int], ProcessExited] = {}
        self._agents: dict[ActorAddress, None] = {}
        self._gave_up: SupervisorGaveUp | None = None

    # lifecycle

    async def on_start(self) -> None:
        limits = self._limits
        self._judge = Judge(limits)
        self._policy = BackoffPolicy(limits.backoff_first_s, limits.backoff_max_s, quiet_s=limits.restart_window_s)
        self._rng = self.ctx.rng(f"supervisor.{self._name}.backoff")
        self._rounds = Rounds(
            self._children, together=self._together, begin=self.ctx.start_task, stop=self._stop, start=self._start,
            ended=lambda child, cause: self._tell("ended", child, cause, "its group has ended"),
            now=self.ctx.now, sleep=self.ctx.sleep,
        )  # fmt: skip
        for spec in self._specs:
            self._adopt(spec)
        self._rounds.request(Recovery(start=[spec.name for spec in self._specs]))

    async def on_stop(self) -> None:
        await self.shutdown()

    @property
    def _limits(self) -> Limits:
        return self._given_limits or self.ctx.limits

    async def ready(self, timeout_s: float) -> None:
        """Wait until every child is ready (or has ended for good).

        Raises:
            SupervisorGaveUp: a child never became ready, or the budget is spent.
            TimeoutError: after ``timeout_s``.
        """
        async with asyncio.timeout(timeout_s):
            for child in list(self._children.values()):
                await child.settled.wait()
        if self._gave_up is not None:
            raise self._gave_up

    async def shutdown(self) -> None:
        """Stop all children in reverse order, each within its deadline. Idempotent; nothing is restarted after it."""
        self._end_all()
        for child in self._children.values():
            child.cut_start(self.ctx.now())
        for child in reversed(list(self._children.values())):
            await self._stop(child)
            child.settled.set()

    def _end_all(self) -> None:
        self._ending = True
        self._rounds.close()

    # children that come and go

    def add_child(self, spec: ChildSpec) -> None:
        """As ``add_children``, for one."""
        self.add_children([spec])

    def add_children(self, specs: Sequence[ChildSpec]) -> None:
        """Add children at the end of the order and start them; a supervisor that ends takes none any more.

        Raises:
            ValueError: a child of such a name exists.
        """
        if self._ending:
            return
        for spec in specs:
            self._adopt(spec)
        self._rounds.request(Recovery(start=[spec.name for spec in specs]))

    async def remove_child(self, name: str, *, cause: ExitCause = ExitCause.STOPPED) -> None:
        """Stop and forget a child with its group; siblings are not disturbed. Unknown names are gone already."""
        if name not in self._children:
            return
        views = [child.view() for child in self._children.values()]
        shared = reach(Strategy.ONE_FOR_ONE, views, name)
        removed = [self._children.pop(one) for one in reversed(shared)]
        for child in removed:
            if child.spec.group:
                child.cut_start(self.ctx.now())
            await self._stop(child, cause)
            child.settled.set()

    def running(self, name: str) -> Running | None:
        """Where ``name`` runs now, or None."""
        child = self._children.get(name)
        return child.running if child is not None else None

    @property
    def restarts(self) -> int:
        """Restarts of all children, present and past."""
        return self._restarts

    def snapshot(self) -> list[ChildInfo]:
        """All children in start order."""
        return [child.info() for child in self._children.values()]

    # how ends are heard

    @handles(ProcessExited)
    async def process_exited(self, message: ProcessExited) -> None:
        for child in self._children.values():
            running = child.running
            if running is not None and _same_process(running, message):
                self._on_exit(child, end_of_process(message))
                return
        if len(self._early_exits) >= self.ctx.limits.early_exits:
            self._early_exits.pop(next(iter(self._early_exits)))
        self._early_exits[message.node, message.pid] = message

    @handles(Down)
    async def down(self, message: Down) -> None:
        if message.address in self._agents:
            del self._agents[message.address]
            self.ctx.start_task(self._lost_agent(message), f"lost agent {message.address}")
            return
        for child in self._children.values():
            if child.running is not None and child.running.address == message.address:
                self._on_exit(child, end_of_actor(message))
                return

    async def _lost_agent(self, message: Down) -> None:
        """A node agent is gone. Its processes are gone with it unless it answers again within the grace."""
        agent = message.address
        names = [c.spec.name for c in self._children.values() if c.running is not None and c.running.agent == agent]
        kept: set[int] = set()
        if message.reason is Gone.UNREACHABLE:
            kept = await still_has(self.ctx, agent, self._limits.unreachable_grace_s)
        if kept:
            self._watch_agent(agent)
        cause = ExitCause.PREEMPTED if message.reason is Gone.STOPPED else ExitCause.UNREACHABLE
        for name in names:
            child = self._children.get(name)
            running = child.running if child is not None else None
            if child is not None and running is not None and running.agent == agent and running.pid not in kept:
                self._on_exit(child, End(cause, f"its node agent is {message.reason}: {message.detail}"))

    # judgement

    def _on_exit(self, child: Child, end: End) -> None:
        running, child.running = child.running, None
        lived_s = self.ctx.now() - child.ready_s if running is not None else 0.0
        child.state, child.reason = str(end.cause), str(end.reason or "")
        if running is not None:
            self._tell("exited", child, end.cause, end.detail, running.incarnation)
        if self._ending or self._children.get(child.spec.name) is not child:
            child.settled.set()  # nothing follows: whoever waits for it would wait for ever
            return
        child.settled.clear()
        plan = decide(self._strategy, [c.view() for c in self._children.values()], child.spec.name, end.cause)
        if not plan.start:
            child.settled.set()
            self._tell("ended", child, end.cause, end.detail)
            if plan.stop:
                self._rounds.request(Recovery(plan.stop, cause=end.cause))
            return
        node = running.node if running is not None else end.node
        failed = self._rounds.has_failed(child.spec.group) if child.spec.group else None
        joins = failed or (failed is not None and not counts(end.cause))
        why = self._judge.why_give_up(child, end, lived_s=lived_s, node=node, now_s=self.ctx.now(), joins=joins)
        if why:
            self._end_all()
            self.ctx.start_task(self._give_up(child, why), "give up")
            return
        child.state, delay_s = "backoff", 0.0
        if not joins:
            # the place of one that ran may be taken at once; a start that failed is not repeated without a pause
            pause_for = end.cause if running is not None else ExitCause.CRASHED
            delay_s = child.backoff.after(pause_for, lived_s=lived_s, rng=self._rng)
            self._tell(
                "restarting", child, end.cause, f"{'with its group ' * bool(child.spec.group)}in {delay_s:.2f} s"
            )
        self._rounds.request(Recovery(plan.stop, plan.start, delay_s, failed=counts(end.cause)))

    def progressed(self) -> None:
        """A step was committed: no child is in a crash loop."""
        for child in self._children.values():
            child.loop.progressed()

    async def _give_up(self, child: Child, why: str) -> None:
        self._gave_up = SupervisorGaveUp(f"{self._name} gave up on {child.spec.name}: {why}")
        self._tell("gave_up", child, None, str(self._gave_up))
        await self.shutdown()
        raise self._gave_up

    # starts and stops

    def _start(self, child: Child) -> Coroutine[Any, Any, None]:
        """Start one child to ready. From this call on its start is under way, so that its group can give it up."""
        removed = self._children.get(child.spec.name) is not child
        begins = not (self._ending or removed or child.starting or child.running is not None)
        if begins:
            child.starting, child.state = True, "starting"
            child.idle.clear()
        return self._started(child, begins=begins)

    async def _started(self, child: Child, *, begins: bool) -> None:
        """``begins``: else another start is under way, or none is wanted. A failure is an end like any other."""
        if not begins:
            return
        spec = child.spec
        again = child.ready_s > 0
        try:
            if child.is_cut or self._ending or self._children.get(spec.name) is not child:
                child.state = str(ExitCause.STOPPED)
                return
            async with asyncio.timeout(spec.ready_s + 2 * self.ctx.limits.spawn_overhead_s) as child.start_scope:
                running = await spec.start(self.ctx)
        except Exception as error:  # noqa: BLE001  whatever a start raises is the child's failure, not ours
            child.starting = False
            if child.is_cut:
                child.state = str(ExitCause.STOPPED)
                return
            end = end_of_start(error)
            child.failed_starts += not again and end.cause is not ExitCause.UNREACHABLE
            child.reason = str(end.reason or "")
            permanent = end.reason is not None and end.reason.permanent
            self._tell("start_failed", child, end.cause, end.detail, permanent=permanent)
            self._on_exit(child, end)
            return
        finally:
            child.starting, child.start_scope = False, None
            child.idle.set()
        child.running, child.state, child.failed_starts = running, "running", 0
        if child.is_cut or self._ending:  # ready before it could be given up: whoever waits for its start stops it
            return
        child.ready_s = self.ctx.now()
        child.restarts += again
        self._restarts += again
        if self._children.get(spec.name) is not child:  # removed by itself, whose start nobody has waited for
            await self._stop(child)
            child.settled.set()
            return
        self._hear_of(running)
        child.settled.set()
        self._tell("adopted" if running.adopted else "started", child, None, "", running.incarnation)
        early = self._early_exits.pop((running.node, running.pid), None)
        if early is not None and _same_process(running, early):
            self._on_exit(child, end_of_process(early))

    def _hear_of(self, running: Running) -> None:
        if running.agent is None:
            self.ctx.watch(running.address)
        else:
            self._watch_agent(running.agent)

    def _watch_agent(self, agent: ActorAddress) -> None:
        if agent not in self._agents:
            self._agents[agent] = None
            self.ctx.watch(agent)

    def _stop(self, child: Child, cause: ExitCause = ExitCause.STOPPED) -> Awaitable[bool]:
        """Stop it; whether it was up. From this call on an end of it is one that we asked for."""
        running, child.running = child.running, None
        return self._stopped(child, running, cause, was_cut=child.is_cut)

    async def _stopped(self, child: Child, running: Running | None, cause: ExitCause, *, was_cut: bool) -> bool:
        if was_cut:
            async with asyncio.timeout(self.ctx.limits.stop_timeout_s):
                await child.idle.wait()
            child.is_cut = False
            running, child.running = running or child.running, None
        if running is None:
            return was_cut
        child.state = "stopping"
        child.settled.clear()
        if running.agent is None:
            self.ctx.unwatch(running.address)
        await running.stop(child.spec.shutdown_s, cause)
        child.state = str(cause)
        self._tell("stopped", child, cause, "", running.incarnation)
        return True

    # telling

    def _adopt(self, spec: ChildSpec) -> None:
        if spec.name in self._children:
            raise ValueError(f"{self._name} has a child named {spec.name!r} already")
        child = Child(spec, Backoff(self._policy), self._judge.crash_loop())
        for other in self._children.values():
            if spec.group and other.spec.group == spec.group:  # they fail as one, so they are counted as one
                child.backoff, child.loop = other.backoff, other.loop
        self._children[spec.name] = child

    def _tell(
        self,
        kind: str,
        child: Child,
        cause: ExitCause | None,
        detail: str,
        incarnation: int = 0,
        *,
        permanent: bool = False,
    ) -> None:
        bad = kind in ("start_failed", "gave_up") or (cause is not None and counts(cause))
        log = self.ctx.log.warning if bad else self.ctx.log.info
        log(f"child {kind}", supervisor=self._name, child=child.spec.name, cause=cause and str(cause), detail=detail)
        if self._on_event is not None:
            now_s = self.ctx.now()
            self._on_event(
                SupervisionEvent(
                    kind,
                    self._name,
                    child.spec.name,
                    now_s,
                    cause,
                    detail,
                    child.restarts,
                    incarnation,
                    child.reason,
                    permanent,
                )
            )


def _same_process(running: Running, news: ProcessExited) -> bool:
    return (running.node, running.pid, running.incarnation) == (news.node, news.pid, news.incarnation)
