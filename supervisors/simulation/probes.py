"""What must hold of the living actors, looked at from outside between two events.

Actors are read here, not asked: a question would be one more event in what is looked at, and a worker that is cut off
or halted, whose promises matter most, would not answer it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from actors.core.system import ActorSystem
from actors.rollout.worker import RolloutWorker
from actors.scheduler.scheduler import Scheduler
from configs.names import follows
from supervisors.simulation.environments import SimulatedEnvironments
from transport.address import PeerId

if TYPE_CHECKING:
    from supervisors.simulation.world import World

_UNKNOWN_S: Final = 30.0
"""Time for which a worker that runs may be unknown to its scheduler, or a process to its supervisor, while no fault is
in force."""
_FENCE_S: Final = 1.0
"""Time that a worker that runs may take, after the end of its lease, to let go of what it held."""


class Probes:
    """Looks at the actors of one world; ``look`` is called now and then."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._unknown_s: dict[tuple[str, str], float] = {}
        """Job, and worker or process → since when it is unknown."""
        self._leases: dict[PeerId, float] = {}
        """Worker's process → when the newest lease ends that it was granted."""
        self._overdue: dict[PeerId, float] = {}
        """Process → since when it is seen to act without a lease."""

    def look(self, *, disturbed: bool) -> Iterator[str]:
        """One sentence for each promise that is broken now."""
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
            yield from self._strays(job.name)

    def _fences(self) -> Iterator[str]:
        """Whoever is cut off holds nothing any more once its lease is over, whatever it has heard."""
        now_s = self._world.loop.time()
        for body in self._world.bodies.values():
            if body.system is None:
                continue
            peer = body.system.peer
            holds = 0 if body.halted else sum(worker.holds for worker in _workers_of(body.system))
            if not holds or now_s <= self._leases.get(peer, now_s):
                self._overdue.pop(peer, None)
            elif now_s - self._overdue.setdefault(peer, now_s) > _FENCE_S:
                self._overdue[peer] = float("inf")  # said once
                late_s = now_s - self._leases[peer]
                yield f"fence: {peer} still holds {holds} of what it was given, {late_s:.1f} s after its lease"

    def _fleet(self, job: str, scheduler: Scheduler) -> Iterator[str]:
        """The workers that the supervisor runs are those that the scheduler gives work to."""
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

    def _strays(self, job: str) -> Iterator[str]:
        """Every process of a job that goes on is one that its supervisors run, or start."""
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
                self._unknown_s[job, f"process {role.pid}"] = float("inf")  # said once
                yield f"{job}: {role.name} runs as process {role.pid}, and nobody has started it who still wants it"


def _workers_of(system: ActorSystem) -> Iterator[RolloutWorker | SimulatedEnvironments]:
    for name in system.actors():
        actor = system.hosted(name)
        if isinstance(actor, RolloutWorker | SimulatedEnvironments):
            yield actor


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
