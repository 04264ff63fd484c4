"""What must hold of the living actors at any moment, looked at from outside between two events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from actors.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from supervisors.simulation.world import World


def broken_promises(world: World) -> Iterator[str]:
    """One sentence for each that is broken now."""
    head = world.head
    if head is None or head.head is None or head.body.halted:
        return
    for job in world.jobs:
        scheduler = head.head.system.hosted(f"scheduler.{job.name}")
        if isinstance(scheduler, Scheduler):
            yield from _credit(job.name, scheduler)
            yield from _tokens(job.name, scheduler)


def _credit(job: str, scheduler: Scheduler) -> Iterator[str]:
    """A worker's credit is what the ledger says that it holds: what is lost of it is never given out again."""
    for worker, counted, held in scheduler.credit():
        if counted != held:
            yield f"{job}: credit: {worker} is counted with {counted} samples, and the ledger says that it has {held}"


def _tokens(job: str, scheduler: Scheduler) -> Iterator[str]:
    """Links repeat and lose nothing silently, so no worker sends what the ledger has, or leaves out what it lacks."""
    counters = scheduler.counters
    if counters.duplicate_rows:
        yield f"{job}: tokens: tokens that the ledger had were generated again"
    if counters.gap_rows:
        yield f"{job}: tokens: tokens did not follow on those that the ledger had"
