"""Checks what must hold of the living actors, from outside, between two events.

Probes read actors directly and send no questions: a question would be an event of its own, and a worker that is cut
off or halted, whose promises matter most, would not answer it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from actors.core.system import ActorSystem
from actors.rollout.worker import RolloutWorker
from actors.scheduler.scheduler import Scheduler
from configs.names import follows
from supervisors.simulation.cluster.environments import SimulatedEnvironments
from supervisors.simulation.cluster.world import World
from transport.address import PeerId

_UNKNOWN_S: Final = 30.0
"""Seconds for which a running worker may be unknown to its scheduler, or a process to its supervisor, while no fault is
in force."""
_FENCE_S: Final = 1.0
"""Seconds that a running worker may take, after its lease ends, to let go of its work."""


class Probes:
    """Checks the actors of one world at each call of ``look``."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._unknown_s: dict[tuple[str, str], float] = {}
        """Job, and worker or process → time since which it is unknown."""
        self._leases: dict[PeerId, float] = {}
        """Process of a worker → time at which its newest lease ends."""
        self._overdue: dict[PeerId, float] = {}
        """Process → time since which it is seen to act without a lease."""

    def look(self, *, disturbed: bool) -> Iterator[str]:
        """Yield a sentence for each promise that is broken now."""
        yield from self._fences()
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
                self._leases.update(scheduler.leases())
            yield from self._orphans(job.name)

    def _fences(self) -> Iterator[str]:
        """A worker whose lease is over holds no work any more, even if it is cut off."""
        now_s = self._world.loop.time()
        for body in self._world.bodies.values():
            if body.system is None:
                continue
            peer = body.system.peer
            holds = 0 if body.halted else sum(worker.holds for worker in _workers_of(body.system))
            if not holds or now_s <= self._leases.get(peer, now_s):
                self._overdue.pop(peer, None)
            elif now_s - self._overdue.setdefault(peer, now_s) > _FENCE_S:
                self._overdue[peer] = float("inf")  # report it once
                late_s = now_s - self._leases[peer]
                yield f"fence: {peer} still holds {holds} of what it was given, {late_s:.1f} s after its lease"

    def _fleet(self, job: str, scheduler: Scheduler) -> Iterator[str]:
        """Each worker that the supervisor runs is known to the scheduler."""
        head, now_s = self._world.head, self._world.loop.time()
        run = head.head.jobs.get(job) if head is not None and head.head is not None else None
        if run is None or run.state.over or "rollout" not in run.tree.supervisors:
            return
        known = {name: peer for name, peer, _, _ in scheduler.credit()}
        for info in run.tree.supervisors["rollout"].snapshot():
            running = run.tree.supervisors["rollout"].running(info.name)
            if follows(info.name):
                continue
            if running is None or known.get(info.name) == running.address.peer:
                self._unknown_s.pop((job, info.name), None)
            elif now_s - self._unknown_s.setdefault((job, info.name), now_s) > _UNKNOWN_S:
                yield f"{job}: fleet: {info.name} runs at {running.address.peer}, and its scheduler does not know it"

    def _orphans(self, job: str) -> Iterator[str]:
        """Every process of a running job is one that its supervisors run or start."""
        head, now_s = self._world.head, self._world.loop.time()
        run = head.head.jobs.get(job) if head is not None and head.head is not None else None
        if run is None or run.state.over:
            return
        children = {info.name: info for info in run.tree.children()}
        for role in self._world.roles():
            info = children.get(role.actor)
            if role.job != job or (info is not None and (info.state == "starting" or info.pid == role.pid)):
                self._unknown_s.pop((job, f"process {role.pid}"), None)
            elif now_s - self._unknown_s.setdefault((job, f"process {role.pid}"), now_s) > _UNKNOWN_S:
                self._unknown_s[job, f"process {role.pid}"] = float("inf")  # report it once
                yield f"{job}: {role.name} runs as process {role.pid}, and nobody has started it who still wants it"


def _workers_of(system: ActorSystem) -> Iterator[RolloutWorker | SimulatedEnvironments]:
    for name in system.actors():
        actor = system.hosted(name)
        if isinstance(actor, RolloutWorker | SimulatedEnvironments):
            yield actor


def _credit(job: str, scheduler: Scheduler) -> Iterator[str]:
    """A worker's credit counts what the ledger says that it holds: credit that is lost is never given out again."""
    for worker, _, counted, held in scheduler.credit():
        if counted != held:
            yield f"{job}: credit: {worker} is counted with {counted} samples, and the ledger says that it has {held}"


def _tokens(job: str, scheduler: Scheduler) -> Iterator[str]:
    """Workers send each token once, in order, since links neither repeat nor silently lose messages."""
    counters = scheduler.counters
    if counters.duplicate_rows:
        yield f"{job}: tokens: tokens that the ledger had were generated again"
    if counters.gap_rows:
        yield f"{job}: tokens: tokens did not follow on those that the ledger had"
