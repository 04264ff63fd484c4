"""Rollout workers that are paid for only while they work: when each is started, and when it is given back.

    cold ──the plan wants more, or prewarming──▶ starting ──its worker is ready──▶ awake ──released──▶ asleep
      ▲                                             │                                └◀────woken────┘   │
      └────── gone ◀── not ready in time ───────────┴── its machine is lost ── (any) ──── for idle_s ───┘

    scheduler ──StepPlanned, WorkerReleased, WorkerWoken, GenerationEnded──▶ job ──▶ here
    here ──the book, whole, whenever something in it changes──▶ machine process: starts and ends machines accordingly
                                                              └─▶ the head's next life goes on with it
    here ──what was billed since the last row──▶ the step's row        (providers/function_book.py)

A function is a machine of one slot, on which the job's elastic pool keeps a worker. Nothing is woken here: the fleet
does that, and sends to sleep.

Invariants
- The book is what machines are started by: a function that is not in it does not run, or is about to be ended.
- With the workers on the head's machine there are never more than ``scheduling.workers_max``, nor for long fewer than
  ``workers_min``: without any worker nothing could be planned.
- One that is not ready in time, or whose machine is lost, is given up, for ever: its name is not used again. The step
  goes on with fewer, and it is said. While a plan lacks functions, others are started, ever more slowly if they fail.
- One that would be started again at once is not given back, nor, without ``idle_s``, one whose sleep has cost less than
  starting another one.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import Final

from actors.policies import prewarm
from actors.policies.prewarm import PrewarmView
from actors.protocol.job_news import StepPlanned, WorkerNews, WorkerReleased, WorkerWoken
from configs.schema import JobConfig
from supervisors.machine.nodes import Nodes
from supervisors.providers.function_book import Function, FunctionBook

_REMEMBERED: Final = 16
"""Newest times, of starts and between generations, by which functions are prewarmed; older ones say little of now."""

Say = Callable[..., None]


class Functions:
    """The functions of one job. ``start`` them once its processes are ready, ``stop`` before its tree is stopped."""

    def __init__(
        self, job: JobConfig, nodes: Nodes, say: Say, record: Say, *, now: Callable[[], float], former: str = ""
    ) -> None:
        """``say``: to whoever listens to the job's progress. ``record``: into events.jsonl. ``former``: the book of
        the head's former life.
        """
        self._provider, self._limits, self._steps = job.provider, job.limits, job.steps
        self._most = max(0, (job.scheduling.workers_max or 0) - job.rollout.workers)
        self._least = max(0, job.scheduling.workers_min - job.rollout.workers)
        self._nodes, self._say, self._record, self._now = nodes, say, record, now
        self._book = FunctionBook.decode(former) if former else FunctionBook()
        self._adopted_until_s = now() + job.limits.nodes_return_s if former else 0.0
        self._want = 0 if former else self._most
        """Functions that are to be starting or awake now. Before there is any plan: all, for nobody knows better."""
        self._generating = False
        self._planned = 0
        """Functions that the newest plan wanted."""
        self._ended_s: float | None = None
        """When the generation of the newest step ended; None: it has not."""
        self._gaps_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._starts_s: deque[float] = deque(maxlen=_REMEMBERED)
        self.newly_billed_s = 0.0
        """Worker-seconds in the newest row."""
        self._failures = 0
        self._not_before_s = 0.0
        self._unsubscribe: Callable[[], None] = lambda: None
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Begin to order functions, and to look after them."""
        if self._task is None:
            self._unsubscribe = self._nodes.subscribe(self._look_at_nodes)
            self._look_at_nodes()  # those of a former head may be back already
            self._task = asyncio.create_task(self._watch(), name="watch over functions")

    def stop(self) -> None:
        """Leave things as they are: the run is over, and its machines end with it. Idempotent."""
        if self._task is not None:
            self._unsubscribe()
            self._task.cancel()

    async def _watch(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(self._limits.function_look_s)

    # ------------------------------------------------------------ what is heard

    def hear(self, news: WorkerNews) -> None:
        """What the job's scheduler says of its workers."""
        now = self._now()
        if isinstance(news, StepPlanned):
            self._plan(news, now)
        elif isinstance(news, WorkerReleased | WorkerWoken):
            if (function := self._book.of_worker(news.worker)) is not None and function.is_ready:
                asleep = isinstance(news, WorkerReleased)
                function.turn("asleep" if asleep else "awake", now, works=not asleep and self._generating)
                if self._generating:
                    self._want = max(0, self._want - 1) if asleep else max(self._want, self._busy)
        else:
            self._generating, self._ended_s, self._want = False, now, 0
            self._planned = 0 if news.step + 1 >= self._steps else self._planned  # after the last one comes nothing
            for function in self._book.there:
                function.turn(function.state, now)  # works no more, and stays as it is until it is released
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
            function.turn("awake", now, works=True)
        for function in self._book.there:
            if function.state == "awake" and function not in used and function not in spare[: plan.more]:
                function.turn("asleep", now)
        self._planned = self._want = min(self._most, len(used) + plan.more)
        for function in reversed(spare[plan.more :]):
            if not function.is_ready:  # the plan does without it
                self._end(function, "not wanted")
        self.look()

    def worker_changed(self, worker: str, how: str) -> None:
        """What the supervisor says of a worker: ``started``, ``adopted`` from a former head, or ``exited``."""
        if (function := self._book.of_worker(worker)) is None:
            return
        if how in ("started", "adopted"):
            self._became_ready(function, self._now())
        elif how == "exited":
            function.turn("starting", self._now())
            self._publish()

    def _became_ready(self, function: Function, now: float) -> None:
        if function.is_ready:
            return
        self._failures, start_s = 0, now - function.since_s
        if function.since_s == function.ordered_s:  # else its machine was there: that is quicker than a start
            self._starts_s.append(start_s)
        function.turn("awake", now, works=self._generating)
        self._record("function_ready", node=function.node, start_s=round(start_s, 3))
        self._publish()

    # ------------------------------------------------------------ what is done

    def look(self) -> None:
        """Start what is lacking, and give back what is idle or has failed."""
        now = self._now()
        for function in list(self._book.there):
            if now >= self._deadline_s(function):
                self._miss(function, "is lost" if function.is_ready else "is not ready in time", now)
            elif function.has_slept(now) >= self._idle_s and not self._would_start_again(now):
                self._end(function, "idle")
        there = len(self._book.there)
        lacking = max(self._want - self._busy, self._least - there, self._prewarmed(there, now))
        if now >= self._not_before_s:
            self._order(min(lacking, self._most - there), now)

    @property
    def _busy(self) -> int:
        return sum(function.state != "asleep" for function in self._book.there)

    def _look_at_nodes(self) -> None:
        """Machines may have joined or gone."""
        now, present = self._now(), {node.name: node for node in self._nodes.present}
        for function in list(self._book.there):
            node = present.get(function.node)
            if node is not None and not node.draining:
                function.joined = True
            elif node is not None:
                self._end(function, "told to go")
            elif function.joined:
                self._miss(function, "is lost", now)

    def _deadline_s(self, function: Function) -> float:
        """When a function is given up: its machine has to be here by then, or its worker ready."""
        limits, join_s = self._limits, function.since_s + self._limits.function_start_s
        if not function.joined:
            return self._adopted_until_s if function.is_ready else max(self._adopted_until_s, join_s)
        return math.inf if function.is_ready else join_s + limits.ready_timeout_s * limits.start_attempts_max

    @property
    def _idle_s(self) -> float:
        """Time for which a function may sleep. With none given its sleep may cost what a start does, and so at most
        twice the least that was possible, however long it turns out not to be needed.
        """
        idle_s, price = self._provider.idle_s, self._provider.asleep_price
        if idle_s is not None:
            return idle_s
        return statistics.mean(self._starts_s) / price if price and self._starts_s else math.inf

    def _prewarmed(self, there: int, now: float) -> int:
        """Functions to start now so that they are ready as the next step is planned."""
        at_s, count = self._prewarm(there, now) or (math.inf, 0)
        return count if at_s <= now else 0

    def _prewarm(self, there: int, now: float) -> prewarm.Prewarm | None:
        if self._ended_s is None:
            return None
        late_s = now - self._ended_s - max(self._gaps_s, default=0.0)
        if late_s > self._idle_s:  # no step is planned, as in a job that is paused
            return None
        view = PrewarmView(
            self._ended_s, self._gaps_s, self._starts_s, self._provider.prewarm_buffer_s, self._planned, there
        )
        return prewarm.decide(view, now)

    def _would_start_again(self, now: float) -> bool:
        """Whether one function less would be ordered in the same breath."""
        there = len(self._book.there) - 1
        return there < self._least or self._prewarmed(there, now) > 0

    def _order(self, count: int, now: float) -> None:
        for _ in range(count):
            function = self._book.begin(now)
            self._record("function_ordered", node=function.node, there=len(self._book.there))
        if count > 0:
            self._publish()

    def _miss(self, function: Function, why: str, now: float) -> None:
        """The step goes on without it; after one that was never ready the next is started after a pause."""
        if not function.is_ready:
            self._failures += 1
            limits = self._limits
            self._not_before_s = now + min(limits.backoff_max_s, limits.backoff_first_s * 2.0 ** (self._failures - 1))
        self._end(function, why)
        self._record("function_missing", node=function.node, why=why, there=len(self._book.there))
        self._say(message=f"the function {function.node} {why}: going on with {len(self._book.there)}")

    def _end(self, function: Function, why: str) -> None:
        billed_s = self._book.end(function, self._now(), self._provider)
        self._record("function_ended", node=function.node, why=why, billed_s=round(billed_s, 3))
        self._publish()

    def _publish(self) -> None:
        self._say(functions=self._book.encode())

    # ------------------------------------------------------------ the bill

    def take_bill(self) -> dict[str, float]:
        """Columns of a step's row: what came to the bill since the last one."""
        columns = self._book.take(self._now(), self._provider)
        self.newly_billed_s = columns["billed_worker_s"]
        self._publish()
        return columns
