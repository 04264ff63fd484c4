"""The supervisor starts children to *ready*, hears how they end, and acts as its strategy and budget say.

    end of a child ─▶ cause ─▶ strategies.decide ─▶ budget ─▶ backoff ─▶ stop siblings in reverse, start in order
                                                       └ exceeded, or a permanent error ─▶ stop all, SupervisorGaveUp

Invariants
- Every end of a child is judged exactly once: an end that we asked for is not judged at all.
- One recovery runs at a time under one_for_all and rest_for_one, and in each group under one_for_one; children that end
  meanwhile join the next round (``recovery.py``).
- A group fails as one child: its recovery costs one unit of budget, and its members share one crash loop.
- A child that was never ready is tried at most ``start_attempts_max`` times in a row, whatever the budget still holds.
  A start that a node agent did not answer is not among them, since it says nothing of the child. It costs a pause, and
  all such starts on one node cost one unit of budget.
- A crash loop is ended, however rare its crashes, and a permanent error is met once (``judgement.py``).
- A cut-off node costs one unit of budget, however many children it had, once its grace to come back is over.
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
from supervisors.tree.child_record import Child, ChildInfo, Stage, SupervisionEvent
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
        limits: limits of the job whose children these are, such as budget and backoff; default: the process's. A
            head that serves jobs was not started with the limits of any of them.
        """
        self._name = name
        self._strategy = strategy
        self._specs = list(children)
        self._on_event = on_event
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
            self._children, independent=self._strategy is Strategy.ONE_FOR_ONE, begin=self.ctx.start_task,
            stop=self._stop, start=self._start, now=self.ctx.now, sleep=self.ctx.sleep,
            ended=lambda child, cause: self._tell("ended", child, cause, "its group has ended"),
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
        """Stop all children in reverse order, each within its deadline, for good. Idempotent."""
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

    def add_children(self, specs: Sequence[ChildSpec]) -> None:
        """Add children at the end of the order and start them; a supervisor that is ending ignores them.

        Raises:
            ValueError: a child of that name exists.
        """
        if self._ending:
            return
        for spec in specs:
            self._adopt(spec)
        self._rounds.request(Recovery(start=[spec.name for spec in specs]))

    async def remove_child(self, name: str, *, cause: ExitCause = ExitCause.STOPPED) -> None:
        """Stop and forget a child with its group; siblings are not disturbed. Unknown names are ignored."""
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
        """Number of restarts of all children, present and past."""
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
        """Judge the end of a lost agent's processes, except those that it still runs if it answers within the grace."""
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
        if child.stage is Stage.UP:
            child.go(Stage.DOWN)
        child.down_as, child.reason = str(end.cause), str(end.reason or "")
        if running is not None:
            self._tell("exited", child, end.cause, end.detail, running.incarnation)
        if not self._wants(child):
            child.settled.set()  # it is not started again, so waiting for it would never end
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
        why = self._judge.why_give_up(
            child.loop, end, lived_s=lived_s, node=node, now_s=self.ctx.now(), failed_starts=child.failed_starts,
            joins=joins,
        )  # fmt: skip
        if why:
            self._end_all()
            self.ctx.start_task(self._give_up(child, why), "give up")
            return
        child.down_as, delay_s = "backoff", 0.0
        if not joins:
            # a child that ran may be replaced at once; a failed start is repeated only after a pause
            pause_for = end.cause if running is not None else ExitCause.CRASHED
            delay_s = child.backoff.after(pause_for, lived_s=lived_s, rng=self._rng)
            self._tell(
                "restarting", child, end.cause, f"{'with its group ' * bool(child.spec.group)}in {delay_s:.2f} s"
            )
        self._rounds.request(Recovery(plan.stop, plan.start, delay_s, failed=counts(end.cause)))

    def progressed(self) -> None:
        """Reset all crash loops: a step was committed."""
        for child in self._children.values():
            child.loop.progressed()

    async def _give_up(self, child: Child, why: str) -> None:
        self._gave_up = SupervisorGaveUp(f"{self._name} gave up on {child.spec.name}: {why}")
        self._tell("gave_up", child, None, str(self._gave_up))
        await self.shutdown()
        raise self._gave_up

    # starts and stops

    def _start(self, child: Child) -> Coroutine[Any, Any, None]:
        """Start one child to ready. From this call on, its start is under way, and its group can cancel it."""
        begins = child.stage is Stage.DOWN and self._wants(child)
        if begins:
            child.go(Stage.STARTING)
        return self._started(child) if begins else _nothing()

    async def _started(self, child: Child) -> None:
        """Carry out a start. A failure is judged like any other end of the child."""
        again = child.ready_s > 0
        running: Running | None = None
        failure: Exception | None = None
        try:
            if child.stage is Stage.STARTING and self._wants(child):  # both may have changed before this first ran
                scope_s = child.spec.ready_s + 2 * self.ctx.limits.spawn_overhead_s
                async with asyncio.timeout(scope_s) as child.start_scope:
                    running = await child.spec.start(self.ctx)
        except Exception as error:  # noqa: BLE001  any error of a start is the child's failure
            failure = error
        finally:
            wanted = child.start_over(running)
        if not wanted:  # the code that cancelled it waits for this, and stops it
            return
        if failure is not None:
            self._start_failed(child, end_of_start(failure), again=again)
        elif running is not None and not self._ending:  # else ``shutdown`` stops it
            await self._became_ready(child, running, again=again)

    def _start_failed(self, child: Child, end: End, *, again: bool) -> None:
        child.failed_starts += not again and end.cause is not ExitCause.UNREACHABLE
        child.reason = str(end.reason or "")
        permanent = end.reason is not None and end.reason.permanent
        self._tell("start_failed", child, end.cause, end.detail, permanent=permanent)
        self._on_exit(child, end)

    async def _became_ready(self, child: Child, running: Running, *, again: bool) -> None:
        child.ready_s = self.ctx.now()
        child.restarts += again
        self._restarts += again
        if not self._wants(child):  # it was removed, and ``remove_child`` has not waited for its start
            await self._stop(child)
            child.settled.set()
            return
        self._hear_of(running)
        child.settled.set()
        self._tell("adopted" if running.adopted else "started", child, None, "", running.incarnation)
        early = self._early_exits.pop((running.node, running.pid), None)
        if early is not None and _same_process(running, early):
            self._on_exit(child, end_of_process(early))

    def _wants(self, child: Child) -> bool:
        """Whether ``child`` is still one of our children, and we are not ending."""
        return not self._ending and self._children.get(child.spec.name) is child

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
        """Stop a child; returns whether it was up. From this call on, its end is one that we asked for.

        A start that was not cancelled is left alone: it notices itself that its child was removed.
        """
        if child.stage is Stage.CUT:
            return self._stopped_after_cut(child, cause)
        running, child.running = child.running, None
        if child.stage is Stage.LEFT:  # taken here, so that a later call finds nothing to stop
            child.go(Stage.DOWN if running is None else Stage.STOPPING)
            return self._stopped(child, running, cause) if running is not None else _cut_is_over()
        if running is None:
            return _nothing_was_up()
        child.go(Stage.STOPPING)
        return self._stopped(child, running, cause)

    async def _stopped_after_cut(self, child: Child, cause: ExitCause) -> bool:
        async with asyncio.timeout(self.ctx.limits.stop_timeout_s):
            await child.no_start.wait()
        if child.stage is Stage.LEFT:  # else another call has stopped it
            running, child.running = child.running, None
            child.go(Stage.DOWN if running is None else Stage.STOPPING)
            if running is not None:
                await self._stopped(child, running, cause)
        return True

    async def _stopped(self, child: Child, running: Running, cause: ExitCause) -> bool:
        child.settled.clear()
        if running.agent is None:
            self.ctx.unwatch(running.address)
        try:
            await running.stop(child.spec.shutdown_s, cause)
        finally:
            child.down_as = str(cause)
            child.go(Stage.DOWN)
        self._tell("stopped", child, cause, "", running.incarnation)
        return True

    # telling

    def _adopt(self, spec: ChildSpec) -> None:
        if spec.name in self._children:
            raise ValueError(f"{self._name} has a child named {spec.name!r} already")
        child = Child(spec, Backoff(self._policy), self._judge.crash_loop())
        for other in self._children.values():
            if spec.group and other.spec.group == spec.group:  # they fail together, so they are counted as one
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
            self._on_event(
                SupervisionEvent(
                    kind, self._name, child.spec.name, self.ctx.now(), cause, detail, child.restarts, incarnation,
                    child.reason, permanent,
                )
            )  # fmt: skip


def _same_process(running: Running, news: ProcessExited) -> bool:
    return (running.node, running.pid, running.incarnation) == (news.node, news.pid, news.incarnation)


async def _nothing() -> None:
    """Do nothing: another start is under way, or none is wanted."""


async def _nothing_was_up() -> bool:
    return False


async def _cut_is_over() -> bool:
    return True
