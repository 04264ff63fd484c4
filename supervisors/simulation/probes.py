"""What must hold of the living actors, looked at from outside between two events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from actors.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from supervisors.simulation.world import World

_UNKNOWN_S: Final = 30.0
"""How long a worker that runs may be unknown to its scheduler while no fault is in force."""


class Probes:
    """One world's. ``look`` is called now and then."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._unknown_s: dict[tuple[str, str], float] = {}
        """Job and worker, since when."""

    def look(self, *, disturbed: bool) -> Iterator[str]:
        """One sentence for each promise that is broken now."""
        head = self._world.head
        if head is None or head.head is None or head.body.halted:
            self._unknown_s.clear()
            return
        if disturbed:
            self._unknown_s.clear()
        for job in self._world.jobs:
            scheduler = head.head.system.hosted(f"scheduler.{job.name}")
            if isinstance(scheduler, Scheduler):
                yield from _credit(job.name, scheduler)
                yield from _tokens(job.name, scheduler)
                yield from self._fleet(job.name, scheduler)

    def _fleet(self, job: str, scheduler: Scheduler) -> Iterator[str]:
        """The workers that the supervisor runs are those that the scheduler gives work to."""
        head, now_s = self._world.head, self._world.loop.time()
        run = head.head.jobs.get(job) if head is not None and head.head is not None else None
        if run is None or run.state.over or "rollout" not in run.supervisors:
            return
        known = {name: peer for name, peer, _, _ in scheduler.credit()}
        for info in run.supervisors["rollout"].snapshot():
            running = run.supervisors["rollout"].running(info.name)
            if running is None or known.get(info.name) == running.address.peer:
                self._unknown_s.pop((job, info.name), None)
            elif now_s - self._unknown_s.setdefault((job, info.name), now_s) > _UNKNOWN_S:
                yield f"{job}: fleet: {info.name} runs at {running.address.peer}, and its scheduler does not know it"


def _credit(job: str, scheduler: Scheduler) -> Iterator[str]:
    """A worker's credit is what the ledger says that it holds: what is lost of it is never given out again."""
    for worker, _, counted, held in scheduler.credit():
        if counted != held:
            yield f"{job}: credit: {worker} is counted with {counted} samples, and the ledger says that it has {held}"


def _tokens(job: str, scheduler: Scheduler) -> Iterator[str]:
    """Links repeat and lose nothing silently, so no worker sends what the ledger has, or leaves out what it lacks."""
    counters = scheduler.counters
    if counters.duplicate_rows:
        yield f"{job}: tokens: tokens that the ledger had were generated again"
    if counters.gap_rows:
        yield f"{job}: tokens: tokens did not follow on those that the ledger had"
