"""Rollout workers that are paid for only while they work: when each is started, and when it is given back.

    cold ──the plan wants more, or prewarming──▶ starting ──its worker is ready──▶ awake ──released──▶ asleep
      ▲                                             │                                └◀────woken────┘   │
      └────── gone ◀── not ready in time ───────────┴── its machine is lost ── (any) ──── for idle_s ───┘

    scheduler ──StepPlanned, WorkerReleased, WorkerWoken, GenerationEnded──▶ job ──▶ here
    here ──the book, whole, whenever something in it changes──▶ machine process: starts and ends machines accordingly
                                                              └─▶ the head's next life goes on with it
    here ──what was billed since the last row──▶ the step's row        (providers/function_book.py)

A function is a machine of one slot, on which the job's elastic pool keeps a worker. The scheduler's fleet, not this
file, wakes functions and sends them to sleep.

Invariants
- The book is what machines are started by: a function that is not in it does not run, or is about to be ended.
- With the workers on the head's machine there are never more than ``scheduling.workers_max``, nor for long fewer than
  ``workers_min``: without any worker nothing could be planned.
- A function that is not ready in time, or whose machine is lost, is given up for good: its name is not used again. The
  step goes on with fewer, and says so. While a plan lacks functions, others are started, more slowly if they fail.
- A function is not given back if it would be started again at once. Where the job sets no ``idle_s``, it is not given
  back before its sleep has cost as much as starting another one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from actors.policies.pool import functions as policy
from actors.policies.pool.functions import FunctionRules, FunctionsView
from actors.protocol.job_news import StepPlanned, WorkerNews, WorkerReleased, WorkerWoken
from configs.names import follows, leader_of
from configs.schema import JobConfig
from supervisors.machine.membership.nodes import Nodes
from supervisors.pool.pool import PoolPart
from supervisors.pool.rollout_workers import News
from supervisors.providers.function_book import KIND, Function, FunctionBook
from supervisors.tree.child_record import SupervisionEvent

_REMEMBERED: Final = 16
"""Number of the newest start times and gaps between generations that prewarming uses; older ones say little of now."""


class Functions(PoolPart):
    """Starts and ends the functions of one job. ``former``: the book of the head's former life."""

    def __init__(
        self, job: JobConfig, nodes: Nodes, news: News, *, now: Callable[[], float], former: str = "",
        machines: str = "",
    ) -> None:  # fmt: skip
        """``machines``: beginning of the names of the job's own machines."""
        self._provider, self._limits, self._steps = job.provider, job.limits, job.steps
        limits, stay = job.limits, job.rollout.workers
        self._rules = FunctionRules(
            least=max(0, job.scheduling.workers_min - stay),
            most=max(0, (job.scheduling.workers_max or 0) - stay),
            join_s=limits.function_start_s,
            start_s=limits.function_start_s + limits.ready_timeout_s * limits.start_attempts_max,
            idle_s=job.provider.idle_s,
            asleep_price=job.provider.asleep_price,
            prewarm_buffer_s=job.provider.prewarm_buffer_s,
        )
        self.billed_s = {KIND: 0.0}
        self._supervisor = f"rollout.{job.name}"
        self._nodes, self._news, self._now = nodes, news, now
        self._book = FunctionBook.decode(former) if former else FunctionBook(prefix=machines)
        self._adopted_until_s = now() + job.limits.nodes_return_s if former else 0.0
        self._want = 0 if former else self._rules.most
        """Number of functions that are to be starting or awake now. Before a new job's first plan: all allowed."""
        self._generating = False
        self._planned = 0
        """Number of functions that the newest plan wanted."""
        self._ended_s: float | None = None
        """Time at which the generation of the newest step ended; None: it has not."""
        self._gaps_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._starts_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._failures = 0
        self._not_before_s = 0.0
        self._unsubscribe: Callable[[], None] = lambda: None
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ life

    def ready(self) -> None:
        """Begin to order functions, and to look after them."""
        if self._task is None:
            self._unsubscribe = self._nodes.subscribe(self._look_at_nodes)
            self._look_at_nodes()  # those of a former head may be back already
            self._task = asyncio.create_task(self._watch(), name="watch over functions")

    def stop(self) -> None:
        """Look after functions no more: the run is over, and its machines end with it."""
        if self._task is not None:
            self._unsubscribe()
            self._task.cancel()

    async def _watch(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(self._limits.function_look_s)

    # ------------------------------------------------------------ what is heard

    def worker_news(self, news: WorkerNews) -> None:
        now = self._now()
        if isinstance(news, StepPlanned):
            self._plan(news, now)
        elif isinstance(news, WorkerReleased | WorkerWoken):
            if (function := self._book.of_worker(news.worker)) is not None and function.is_ready:
                asleep = isinstance(news, WorkerReleased)
                function.enter("asleep" if asleep else "awake", now, works=not asleep and self._generating)
                if self._generating:
                    busy = sum(one.state != "asleep" for one in self._book.there)
                    self._want = max(0, self._want - 1) if asleep else max(self._want, busy)
        else:
            self._generating, self._ended_s, self._want = False, now, 0
            self._planned = 0 if news.step + 1 >= self._steps else self._planned  # after the last one comes nothing
            for function in self._book.there:
                function.enter(function.state, now)  # works no more, and stays as it is until it is released
        self._publish()

    def _plan(self, plan: StepPlanned, now: float) -> None:
        if self._ended_s is not None:
            self._gaps_s.append(now - self._ended_s)
        self._generating, self._ended_s = True, None
        used = [function for function in self._book.there if function.worker in plan.workers]
        spare = [function for function in self._book.there if function.is_new and function not in used]
        for function in used:
            function.is_new = False
            self._became_ready(function, now)
            function.enter("awake", now, works=True)
        for function in self._book.there:
            if function.state == "awake" and function not in used and function not in spare[: plan.more]:
                function.enter("asleep", now)
        self._planned = self._want = min(self._rules.most, len(used) + plan.more)
        for function in reversed(spare[plan.more :]):
            if not function.is_ready:  # the plan does without it
                self._end(function, "not wanted")
        self.look()

    def child_event(self, event: SupervisionEvent) -> None:
        if event.supervisor != self._supervisor or (follows(event.child) and event.kind != "exited"):
            return
        if (function := self._book.of_worker(leader_of(event.child))) is None:
            return
        if event.kind in ("started", "adopted"):
            self._became_ready(function, self._now())
        elif event.kind == "exited":
            function.enter("starting", self._now())
            self._publish()

    def _became_ready(self, function: Function, now: float) -> None:
        if function.is_ready:
            return
        self._failures, start_s = 0, now - function.since_s
        if function.since_s == function.ordered_s:  # else only its worker restarted, which is quicker
            self._starts_s.append(start_s)
        function.enter("awake", now, works=self._generating)
        self._news.record("function_ready", node=function.node, start_s=round(start_s, 3))
        self._publish()

    # ------------------------------------------------------------ what is done

    def look(self) -> None:
        """Start what is lacking, and give back what is idle or has failed."""
        now = self._now()
        for end in policy.ends(self._rules, self._view(), now):
            function = next(one for one in self._book.there if one.node == end.node)
            if end.missed:
                self._miss(function, end.why, now)
            else:
                self._end(function, end.why)
        if now >= self._not_before_s:
            self._order(policy.lacking(self._rules, self._view(), now), now)

    def _view(self) -> FunctionsView:
        return FunctionsView(
            self._book.there, self._want, self._planned, self._ended_s, self._gaps_s, self._starts_s,
            self._adopted_until_s,
        )  # fmt: skip

    def _look_at_nodes(self) -> None:
        """See which machines have joined or gone."""
        now, present = self._now(), {node.name: node for node in self._nodes.present}
        for function in list(self._book.there):
            node = present.get(function.node)
            if node is not None and not node.draining:
                function.joined = True
            elif node is not None:
                self._end(function, "told to go")
            elif function.joined:
                self._miss(function, "is lost", now)

    def _order(self, count: int, now: float) -> None:
        for _ in range(count):
            function = self._book.begin(now)
            self._news.record("function_ordered", node=function.node, there=len(self._book.there))
        if count > 0:
            self._publish()

    def _miss(self, function: Function, why: str, now: float) -> None:
        """The step goes on without it; after one that was never ready the next is started after a pause."""
        if not function.is_ready:
            self._failures += 1
            limits = self._limits
            self._not_before_s = now + min(limits.backoff_max_s, limits.backoff_first_s * 2.0 ** (self._failures - 1))
        self._end(function, why)
        self._news.record("function_missing", node=function.node, why=why, there=len(self._book.there))
        self._news.say(message=f"the function {function.node} {why}: going on with {len(self._book.there)}")

    def _end(self, function: Function, why: str) -> None:
        billed_s = self._book.end(function, self._now(), self._provider)
        self._news.record("function_ended", node=function.node, why=why, billed_s=round(billed_s, 3))
        self._publish()

    def _publish(self) -> None:
        self._news.say(functions=self._book.encode())

    # ------------------------------------------------------------ the bill

    def take_bill(self) -> dict[str, float]:
        columns = self._book.take(self._now(), self._provider)
        self.billed_s = {KIND: columns["billed_worker_s"]}
        self._publish()
        return columns
