"""Stage balancing in a live job: after each step the number of rollout workers follows the gap between the stages.

    row of a step ─▶ StageReport ─▶ policies.pool_size.decide ─▶ another number? ─▶ resize: scale, or pool and provider

Invariants
- One change at a time: a step that ends while the last change is under way is not judged.
- It counts workers that run, whoever started them; an operator's ``scale`` and lost machines are seen as they are.
- Workers on machines that come and go begin with all that come, up to the bound, until that is known to be too much.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from actors.policies.pool_size import PoolRules, PoolSize, StageReport, decide
from configs.names import follows
from configs.schema import JobConfig

if TYPE_CHECKING:
    from supervisors.tree.supervisor import Supervisor


class StageBalancer:
    """A stage balancer belongs to one job with ``scheduling.workers_max``.

    Args:
        rollout: supervises the rollout workers.
        resize: brings about a number of them.
        price_share: of one more worker, as in ``StageReport``.
        record: into events.jsonl.
    """

    def __init__(
        self,
        job: JobConfig,
        rollout: Supervisor,
        resize: Callable[[int], Awaitable[None]],
        price_share: Callable[[], float | None],
        record: Callable[..., None],
    ) -> None:
        scheduling, elastic = job.scheduling, job.cluster.place_rollout == "elastic"
        assert scheduling.workers_max is not None, "without it nothing is balanced"
        stay = job.rollout.workers if elastic else 0  # only the others come and go
        self._rules = PoolRules(max(scheduling.workers_min, stay), scheduling.workers_max)
        self._rollout = rollout
        self._resize = resize
        self._price_share = price_share
        self._record = record
        self._size = PoolSize(self._rules.most if elastic else self._count())
        self._change: asyncio.Task[None] | None = None
        if elastic:
            self._begin(self._rules.most)

    def hear(self, row: Mapping[str, Any]) -> None:
        """What the job says; rows of steps are what counts."""
        if "rollout_idle_fraction" not in row or (self._change is not None and not self._change.done()):
            return
        report = StageReport(
            gen_s=row["seconds"] * (1.0 - row["rollout_idle_fraction"]),
            train_s=row.get("trainer_seconds", row["seconds"]) * (1.0 - row["trainer_idle_fraction"]),
            workers=self._count(),
            price_share=self._price_share(),
        )
        before, self._size = self._size, decide(self._rules, self._size, report)
        if self._size.wanted != before.wanted:
            fields = {"workers": report.workers, "wanted": self._size.wanted, "step": int(row["step"])}
            self._record("pool_resized", **fields, gen_s=report.gen_s, train_s=report.train_s)
            self._begin(self._size.wanted)

    def stop(self) -> None:
        """Leave things as they are."""
        if self._change is not None:
            self._change.cancel()

    def _count(self) -> int:
        workers = [info.name for info in self._rollout.snapshot() if not follows(info.name)]
        return sum(self._rollout.running(worker) is not None for worker in workers)

    def _begin(self, workers: int) -> None:
        async def run() -> None:
            await self._resize(workers)

        self._change = asyncio.create_task(run(), name=f"resize the pool to {workers} workers")
