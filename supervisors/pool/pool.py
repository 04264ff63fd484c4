"""A job's pool: how many rollout workers it has, on which machines, and who leaves first.

    operator ── scale, drain ──▶ Pool ─▶ rollout-0 … on machines that stay (``policies/pool/placing.py``)
    JobTree ─ starting, ready, ─▶  │
      children's events, the end   ├─▶ NodeWorkers   a worker on each slot of each machine that comes and goes
                                   ├─▶ Functions     machines that are paid for only while their workers work
                                   ├─▶ Resizing      another number after a step: stage balancing, capacity target
                                   └─▶ ReplicaMoves  the trainer's replicas on other machines

Without parts a pool is a fixed number of workers. Pure functions in ``actors/policies`` decide; the pool and its parts
give them the facts, and carry out what they say.

Invariants
- JobTree, JobRun and operators call the pool alone: none asks which parts it has.
- Parts are told in their order, and stop in the reverse one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from actors.policies.pool import placing
from supervisors.pool.rollout_workers import News, RolloutWorkers

if TYPE_CHECKING:
    from actors.protocol.job_news import WorkerNews
    from supervisors.tree.child_record import SupervisionEvent
    from supervisors.tree.children import ChildSpec


class PoolPart:
    """Adds to a pool what not every job needs. A part overrides the methods that concern it."""

    billed_s: Mapping[str, float] = MappingProxyType({})
    """Kinds of machines that are paid for by a bill, not for as long as they are there → worker-seconds in the newest
    bill."""

    @property
    def workers(self) -> Collection[str]:
        """Names of the workers that are this part's, which ``scale`` does not count."""
        return ()

    def starting(self) -> None:
        """The job's processes are about to be started."""

    def ready(self) -> None:
        """Every process is ready."""

    def stop(self) -> None:
        """Leave things as they are: the job's processes are about to be stopped."""

    def ended(self) -> None:
        """The rollout workers have ended with their supervisor."""

    def child_event(self, event: SupervisionEvent) -> None:
        """A supervisor of the job says what has become of a child."""

    def worker_news(self, news: WorkerNews) -> None:
        """The job's scheduler says what its workers do."""

    def take_bill(self) -> dict[str, float]:
        """Columns of a step's row: what was billed since the last row."""
        return {}

    def trainer_waits(self) -> tuple[str, float]:
        """(Machine that a stopped trainer waits for, in words; seconds waited so far); empty: it waits for none."""
        return "", 0.0


class Pool:
    """Holds the rollout workers of one job. Set ``workers_wanted`` until they are started, then call ``scale``."""

    def __init__(self, rollout: RolloutWorkers, news: News, workers_wanted: int) -> None:
        self._rollout, self._news = rollout, news
        self._parts: list[PoolPart] = []
        self.workers_wanted = workers_wanted
        """Number of rollout workers that is wanted on machines that stay."""

    def add(self, parts: Sequence[PoolPart]) -> None:
        """Add parts; only before the processes are started."""
        self._parts.extend(parts)

    # ------------------------------------------------------------ life

    def starting(self) -> list[ChildSpec]:
        """The processes are about to be started; returns the workers to begin with."""
        for part in self._parts:
            part.starting()
        return [spec for number in range(self.workers_wanted) for spec in self._rollout.specs(number)]

    def ready(self) -> None:
        for part in self._parts:
            part.ready()

    def stop(self) -> None:
        for part in reversed(self._parts):
            part.stop()

    def ended(self) -> None:
        for part in self._parts:
            part.ended()

    # ------------------------------------------------------------ what is heard

    def child_event(self, event: SupervisionEvent) -> None:
        self._rollout.child_event(event)
        for part in self._parts:
            part.child_event(event)

    def worker_news(self, news: WorkerNews) -> None:
        for part in self._parts:
            part.worker_news(news)

    # ------------------------------------------------------------ what is asked

    @property
    def billed_s(self) -> dict[str, float]:
        return {kind: seconds for part in self._parts for kind, seconds in part.billed_s.items()}

    def take_bill(self) -> dict[str, float]:
        return {column: value for part in self._parts for column, value in part.take_bill().items()}

    def trainer_waits(self) -> tuple[str, float]:
        return next((waits for part in self._parts if (waits := part.trainer_waits())[0]), ("", 0.0))

    # ------------------------------------------------------------ operators

    async def scale(self, workers: int) -> None:
        """Set the number of workers on machines that stay. Those that leave hand their samples back first."""
        self.workers_wanted = workers
        if not self._rollout.begun:  # it will be started with as many
            return
        present = self._rollout.names().difference(*(part.workers for part in self._parts))
        start, leave = placing.by_number(present, workers)
        self._news.say(workers=workers)
        for number in start:
            self._rollout.start(self._rollout.specs(number))
        for name in leave:
            await self._rollout.drain(name)

    async def drain_worker(self, name: str) -> bool:
        """Have a worker hand back its samples, then remove it; False if there is none of that name."""
        return await self._rollout.drain(name)

    async def drain_node(self, node: str) -> int:
        """Move every rollout worker off ``node``; returns how many."""
        moved = self._rollout.on(node)
        for name in moved:
            await self._rollout.drain(name)
        if self._rollout.begun:
            await self.scale(self.workers_wanted)
        return len(moved)
