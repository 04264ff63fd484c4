"""Rollout workers follow the machines: one on each slot of each node beyond the head's, for as long as it is there.

    node joins ─▶ a worker for each slot        node drains ─▶ its workers hand back, as late as it allows, and go
    node lost  ─▶ its workers are removed       worker ended on a living node ─▶ another one, after a pause
    aim(n)     ─▶ the first n places, by the nodes' joining, have workers; those on the others are drained
    shares     ─▶ with other jobs' pools, a place is the job's only while it is granted; else its worker is drained

Invariants
- A worker belongs to its node: it is called ``rollout-<node>`` (``rollout-<node>.<slot>`` from the second on) and is
  never started elsewhere. So a head's next life knows what to adopt.
- Losing a node costs no restart budget: here machines go all the time. A worker that crashes is started again on its
  node, within a budget of the node's own; when that is spent, or the node's workers are in a crash loop, the node is
  passed over, and the record says so.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from actors.policies.pool import placing
from actors.policies.pool.placing import Leave, PlacingView, PoolNode
from actors.policies.pool.sizing import Prices
from configs.limits import Limits
from supervisors.pool.pool import PoolPart
from supervisors.pool.rollout_workers import News
from supervisors.pool.slot_shares import WHOLE, PoolShare
from supervisors.tree.judgement import End, Judge
from supervisors.tree.restart_budget import ExitCause, counts

if TYPE_CHECKING:
    from supervisors.machine.membership.nodes import Node, Nodes
    from supervisors.pool.rollout_workers import RolloutWorkers
    from supervisors.tree.child_record import SupervisionEvent


class NodeWorkers(PoolPart):
    """Has a worker on each slot that its job may use of the nodes that come and go.

    Args:
        now: the clock.
        share: this job's share of the machines; default: all.
        ranks: number of processes of one worker, each with a device of its own.
    """

    def __init__(
        self,
        nodes: Nodes,
        rollout: RolloutWorkers,
        news: News,
        *,
        job: str,
        limits: Limits,
        now: Callable[[], float],
        share: PoolShare = WHOLE,
        ranks: int = 1,
    ) -> None:
        self._nodes, self._rollout, self._news = nodes, rollout, news
        self._job, self._limits, self._now = job, limits, now
        self._share, self._ranks = share, ranks
        self._workers: dict[str, str] = {}
        """Workers that were started and not asked to leave → their nodes."""
        self._most: int | None = None
        self._known: dict[str, str] = {}
        """Nodes that have joined → their kinds."""
        self._draining: set[str] = set()
        self._lives: dict[str, NodeLives] = {}
        self._ready_s: dict[str, float] = {}
        """Time at which each worker became ready."""
        self._passed_over: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unsubscribe: Callable[[], None] = lambda: None
        self._stopped = False

    @property
    def workers(self) -> set[str]:
        return set(self._workers)

    @property
    def nodes(self) -> set[str]:
        """Names of the nodes on which its workers are."""
        return set(self._workers.values())

    def ready(self) -> None:
        self._unsubscribe = self._nodes.subscribe(self.look)
        self._share.join(self.look)
        self.look()

    def aim(self, workers: int | None) -> None:
        """Have at most this many from now on, on the nodes that joined first; None: one on each slot."""
        self._most = workers
        self.look()

    def stop(self) -> None:
        self._stopped = True
        self._unsubscribe()
        self._share.leave()
        for task in self._tasks:
            task.cancel()

    def ended(self) -> None:
        self._share.ended()

    def look(self) -> None:
        """Start and remove workers as nodes have come and gone."""
        if self._stopped:
            return
        there = {node.name: node for node in self._nodes.usable_by(self._job) if not node.local}
        self._tell_changes(there)
        seen = [
            PoolNode(name, tuple(worker_names(node, self._ranks)), node.leaves_s if node.draining else None)
            for name, node in there.items()
        ]
        view = PlacingView(seen, self._workers, self._passed_over)
        granted = self._share.granted([slot.worker for slot in view.slots()], self._most)
        placed = placing.decide(view, granted, self._now())
        for leave in placed.leave:
            del self._workers[leave.worker]
            self._later(self._remove(leave), f"remove {leave.worker}")
        for worker, node in placed.run:
            self._run(worker, node)

    def child_event(self, event: SupervisionEvent) -> None:
        if event.kind == "started" and event.child in self._workers:
            self._ready_s[event.child] = self._now()
        elif event.kind == "ended" and event.cause is not None:
            self._worker_ended(event.child, event.cause)

    def _worker_ended(self, worker: str, cause: ExitCause) -> None:
        """Have a worker started again after a pause, since its supervisor does not; or give its node up."""
        node = self._workers.get(worker)
        if node is None or self._stopped:
            return
        now, pause_s = self._now(), self._limits.backoff_first_s
        if counts(cause) and cause is not ExitCause.UNREACHABLE:  # unreachable: its node's end, seen here first
            lives = self._lives.setdefault(node, NodeLives(self._limits))
            gives_up = lives.ended(cause, lived_s=now - self._ready_s.get(worker, now), now_s=now)
            if gives_up:
                self._passed_over.add(node)
                self._news.record("node_passed_over", node=node, crashes=lives.crashes(now), cause=str(cause))
            pause_s = min(self._limits.backoff_max_s, pause_s * 2.0 ** (lives.crashes(now) - 1))
        self._ready_s.pop(worker, None)
        self._later(self._again(worker, pause_s), f"start {worker} again")

    # ------------------------------------------------------------ acts

    def _run(self, worker: str, node: str) -> None:
        if worker not in self._workers and not self._rollout.runs(worker):
            self._workers[worker] = node
            self._share.took(worker)
            try:
                self._rollout.start(self._rollout.specs_on(worker, node))
            except ValueError:  # the one before it is still being removed; ``_remove`` looks again
                del self._workers[worker]

    async def _remove(self, leave: Leave) -> None:
        worker, within_s = leave
        if within_s is None:
            await self._rollout.remove_lost(worker)
        else:
            await self._rollout.drain(worker, within_s)
        self._share.left(worker)
        self.look()

    async def _again(self, worker: str, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        self._workers.pop(worker, None)
        await self._rollout.remove(worker)
        self._share.left(worker)
        self.look()

    def _tell_changes(self, there: Mapping[str, Node]) -> None:
        for name, node in there.items():
            if name not in self._known:
                self._news.record("node_joined", node=name, kind=node.kind, slots=node.slots)
            if node.draining and name not in self._draining:
                self._news.record("node_draining", node=name, kind=node.kind)
        for name in [name for name in self._known if name not in there]:
            self._news.record("node_left", node=name, kind=self._known[name])
            self._lives.pop(name, None)
            self._passed_over.discard(name)
        self._known = {name: node.kind for name, node in there.items()}
        self._draining = {name for name, node in there.items() if node.draining}

    def _later(self, work: Awaitable[None], name: str) -> None:
        async def run() -> None:
            await work

        task = asyncio.create_task(run(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class NodeLives:
    """Counts how the workers of one node end: within a budget, and in a crash loop of short lives. The number of lives
    without a committed step has no bound, since other workers go on meanwhile.
    """

    def __init__(self, limits: Limits) -> None:
        self._judge = Judge(limits)
        self._loop = self._judge.crash_loop(lives_max=math.inf)

    def ended(self, cause: ExitCause, *, lived_s: float, now_s: float) -> bool:
        """Count a worker's end; returns whether the node is given up."""
        return bool(self._judge.why_give_up(self._loop, End(cause, ""), lived_s=lived_s, node="", now_s=now_s))

    def crashes(self, now_s: float) -> int:
        """Number of ends that count at this time."""
        return self._judge.spent(now_s)


def worker_names(node: Node, ranks: int) -> list[str]:
    """Names of the workers that ``node`` takes."""
    return [f"rollout-{node.name}" + (f".{slot}" if slot else "") for slot in range(node.room(ranks))]


def prices_of(nodes: Iterable[Node], prices: Mapping[str, float]) -> Prices | None:
    """What these machines cost; None without prices, or while none of them comes and goes."""
    nodes = list(nodes)
    of_worker = [prices.get(node.kind, 0.0) / node.slots for node in nodes if not node.local and node.slots]
    if not prices or not of_worker:
        return None
    of_nodes = [(node.local, prices.get(node.kind, 0.0)) for node in nodes]
    return Prices(sum(price for local, price in of_nodes if local), max(of_worker), sum(price for _, price in of_nodes))
