"""A pool's size follows its job's steps: stage balancing, or the capacity target of seeding.

    row of a step ─▶ policies/pool/sizing.py ─▶ another number? ─▶ recorded ─┬─▶ with nodes: NodeWorkers.aim, and told:
                                                                             │   the provider hears of it, too
                                                                             └─▶ else: ``scale``

Invariants
- One change at a time: a step that ends while the last change is under way is not judged.
- Workers on machines that come and go begin with all that come, up to the bound, until that is known to be too much.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from actors.policies.pool.pool_size import PoolRules
from actors.policies.pool.sizing import ByStages, ByTarget, SizeView, Sizing
from configs.schema import JobConfig
from supervisors.machine.membership.nodes import Nodes
from supervisors.pool.node_workers import NodeWorkers, prices_of
from supervisors.pool.pool import Pool, PoolPart
from supervisors.pool.rollout_workers import News, RolloutWorkers


class Resizing(PoolPart):
    """Resizes one job's pool. ``node_workers``: the workers to resize; None: those on machines that stay."""

    def __init__(
        self,
        job: JobConfig,
        nodes: Nodes,
        rollout: RolloutWorkers,
        pool: Pool,
        node_workers: NodeWorkers | None,
        news: News,
    ) -> None:
        self._job, self._nodes, self._rollout = job, nodes, rollout
        self._pool, self._node_workers, self._news = pool, node_workers, news
        self._sizing: Sizing | None = None
        self._change: asyncio.Task[None] | None = None
        self._unsubscribe: Callable[[], None] = lambda: None

    def ready(self) -> None:
        job, scheduling = self._job, self._job.scheduling
        if scheduling.seeding:
            self._sizing = ByTarget(self._pool.workers_wanted)
        else:
            assert scheduling.workers_max is not None, "without it nothing is balanced"
            elastic = self._node_workers is not None
            stay = job.rollout.workers if elastic else 0  # only the others come and go
            rules = PoolRules(max(scheduling.workers_min, stay), scheduling.workers_max)
            self._sizing = ByStages(rules, rules.most if elastic else self._rollout.running())
            if elastic:
                self._resize(rules.most)
        self._unsubscribe = self._news.subscribe(self.hear)

    def hear(self, row: Mapping[str, Any]) -> None:
        """Take in what the job says; only rows of steps count."""
        if self._sizing is None or (self._change is not None and not self._change.done()):
            return
        prices = None
        if self._node_workers is not None:
            prices = prices_of(self._nodes.usable_by(self._job.name), self._job.cluster.prices)
        wanted = self._sizing.decide(row, SizeView(self._pool.workers_wanted, self._rollout.running(), prices))
        if wanted is not None:
            self._news.record(wanted.event, **wanted.fields)
            self._resize(wanted.workers)

    def stop(self) -> None:
        self._unsubscribe()
        if self._change is not None:
            self._change.cancel()

    def _resize(self, workers: int) -> None:
        if self._node_workers is None:
            self._change = asyncio.create_task(self._pool.scale(workers), name=f"resize the pool to {workers} workers")
            return
        remote = max(0, workers - self._pool.workers_wanted)
        self._node_workers.aim(remote)
        self._news.say(remote_workers=remote, remote_nodes=",".join(sorted(self._node_workers.nodes)))
