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
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from configs.limits import Limits
from supervisors.jobs.pool_share import WHOLE, PoolShare
from supervisors.tree.restart_budget import CrashLoop, ExitCause, RestartBudget, counts

if TYPE_CHECKING:
    from supervisors.machine.nodes import Node, Nodes
    from supervisors.tree.children import ChildSpec
    from supervisors.tree.supervisor import Supervisor

Record = Callable[..., None]


class ElasticPool:
    """A pool belongs to one job. ``start`` it when the supervisor runs, ``stop`` it before the supervisor is stopped.

    Args:
        make: a worker's name and its node's name, to specs that start it, with its ranks, there and nowhere else.
        drain: has a worker hand back its samples, within so many seconds, and removes it; 0: at once.
        release: a worker of a node that is gone has no place there any more, should the node come back.
        record: into events.jsonl.
        now: the clock.
        share: what of the machines is this job's; default: all.
        ranks: processes, each with a device of its own, of one worker.
    """

    def __init__(
        self,
        nodes: Nodes,
        supervisor: Supervisor,
        make: Callable[[str, str], list[ChildSpec]],
        drain: Callable[[str, float], Awaitable[bool]],
        release: Callable[[str], None],
        record: Record,
        *,
        limits: Limits,
        now: Callable[[], float],
        share: PoolShare = WHOLE,
        ranks: int = 1,
    ) -> None:
        self._nodes = nodes
        self._supervisor = supervisor
        self._make = make
        self._drain = drain
        self._release = release
        self._record = record
        self._limits = limits
        self._now = now
        self._share = share
        self._ranks = ranks
        self._workers: dict[str, str] = {}
        self._most: int | None = None
        self._known: dict[str, str] = {}
        self._draining: set[str] = set()
        self._budgets: dict[str, RestartBudget] = {}
        self._loops: dict[str, CrashLoop] = {}
        self._ready_s: dict[str, float] = {}
        """When each worker became ready."""
        self._passed_over: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unsubscribe: Callable[[], None] = lambda: None
        self._stopped = False

    @property
    def workers(self) -> set[str]:
        """Names of those that it has started and not removed."""
        return set(self._workers)

    @property
    def nodes(self) -> set[str]:
        """Names of those on which its workers are."""
        return set(self._workers.values())

    def start(self) -> None:
        self._unsubscribe = self._nodes.subscribe(self.look)
        self._share.join(self.look)
        self.look()

    def aim(self, workers: int | None) -> None:
        """At most this many from now on, the nodes that joined first before others; None: one on each slot."""
        self._most = workers
        self.look()

    def stop(self) -> None:
        """Leave things as they are."""
        self._stopped = True
        self._unsubscribe()
        self._share.leave()
        for task in self._tasks:
            task.cancel()

    def look(self) -> None:
        """Nodes may have come or gone: start and remove workers accordingly."""
        if self._stopped:
            return
        there = {node.name: node for node in self._nodes.present if not node.local}
        self._tell_changes(there)
        places = [
            (worker, name)
            for name, node in there.items()
            if not node.draining and name not in self._passed_over
            for worker in worker_names(node, self._ranks)
        ]
        granted = self._share.granted([worker for worker, _ in places], self._most)
        places = [(worker, name) for worker, name in places if worker in granted][: self._most]
        wanted = {worker for worker, _ in places}
        for worker, node in list(self._workers.items()):
            gone = node not in there or there[node].draining
            if gone or (worker not in wanted and node not in self._passed_over):
                del self._workers[worker]
                self._later(self._remove(worker, there.get(node)), f"remove {worker}")
        for worker, name in places:
            self._add(worker, name)

    def worker_started(self, worker: str) -> None:
        """The supervisor says that ``worker`` is ready."""
        if worker in self._workers:
            self._ready_s[worker] = self._now()

    def _loop_on(self, node: str) -> CrashLoop:
        """A worker that takes long to start never spends its node's budget; others get on meanwhile."""
        limits = self._limits
        fresh = CrashLoop(restarts_max=limits.restart_max, healthy_s=limits.restart_healthy_s, lives_max=math.inf)
        return self._loops.setdefault(node, fresh)

    def worker_ended(self, worker: str, cause: ExitCause) -> None:
        """The supervisor says that ``worker`` has ended for good, by ``cause``."""
        node = self._workers.get(worker)
        if node is None or self._stopped:
            return
        limits, pause_s = self._limits, self._limits.backoff_first_s
        if counts(cause) and cause is not ExitCause.UNREACHABLE:  # the latter is the node's end, seen before the node's
            budget = self._budgets.setdefault(
                node, RestartBudget(restarts_max=limits.restart_max, window_s=limits.restart_window_s)
            )
            within = budget.spend(cause, self._now())
            lived_s = self._now() - self._ready_s.get(worker, self._now())
            if not self._loop_on(node).ended(cause, lived_s=lived_s) or not within:
                self._passed_over.add(node)
                self._record("node_passed_over", node=node, crashes=budget.spent(self._now()), cause=str(cause))
            pause_s = min(limits.backoff_max_s, pause_s * 2.0 ** (budget.spent(self._now()) - 1))
        self._ready_s.pop(worker, None)
        self._later(self._again(worker, pause_s), f"start {worker} again")

    def ended(self) -> None:
        """After ``stop``: its workers have ended with their supervisor."""
        self._share.ended()

    # ------------------------------------------------------------ acts

    def _add(self, worker: str, node: str) -> None:
        if worker not in self._workers and self._supervisor.running(worker) is None:
            self._workers[worker] = node
            self._share.took(worker)
            try:
                self._supervisor.add_children(self._make(worker, node))
            except ValueError:  # the one before it is still being removed; ``_remove`` looks again
                del self._workers[worker]

    async def _remove(self, worker: str, node: Node | None) -> None:
        if node is not None:
            left_s = node.leaves_s - self._now() if node.draining else 0.0
            await self._drain(worker, left_s)
        else:
            self._release(worker)
            await self._supervisor.remove_child(worker, cause=ExitCause.PREEMPTED)
        self._share.left(worker)
        self.look()

    async def _again(self, worker: str, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        self._workers.pop(worker, None)
        await self._supervisor.remove_child(worker)
        self._share.left(worker)
        self.look()

    def _tell_changes(self, there: dict[str, Node]) -> None:
        for name, node in there.items():
            if name not in self._known:
                self._record("node_joined", node=name, kind=node.kind, slots=node.slots)
            if node.draining and name not in self._draining:
                self._record("node_draining", node=name, kind=node.kind)
        for name in [name for name in self._known if name not in there]:
            self._record("node_left", node=name, kind=self._known[name])
            self._budgets.pop(name, None)
            self._loops.pop(name, None)
            self._passed_over.discard(name)
        self._known = {name: node.kind for name, node in there.items()}
        self._draining = {name for name, node in there.items() if node.draining}

    def _later(self, work: Awaitable[None], name: str) -> None:
        async def run() -> None:
            await work

        task = asyncio.create_task(run(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def worker_names(node: Node, ranks: int) -> list[str]:
    """Names of the workers that ``node`` takes."""
    return [f"rollout-{node.name}" + (f".{slot}" if slot else "") for slot in range(node.room(ranks))]
