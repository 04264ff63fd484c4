"""What a simulated process stands on and consists of; the world, which builds all of it, is known to none of it.

Ground ◀─ Body ◀─ SimulatedChild   a role process or a head, owned by whoever launched it (children.py)
               ◀─ MainProcess      a machine's first process, owned by the world (main_process.py)
Place  ◀─ SimulatedChild           the machine on which it runs (machine.py)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from actors.core.system import ActorSystem
from actors.weights.segments import SIMULATED_HOST, Host
from configs.scenario import Scenario, SimulatedJob
from configs.schema import JobConfig
from supervisors.machine.machine import Machine
from supervisors.simulation.published import PublishedWeights
from supervisors.simulation.rank_watch import RankWatch
from supervisors.simulation.records import JobRecord
from supervisors.simulation.service_watch import ServiceWatch
from supervisors.simulation.trace import Trace
from transport.memory_transport import MemoryTransport
from transport.sim.loop import SimulatedLoop
from transport.sim.network import SimNetwork
from transport.sim.process import SimProcess

END_TOKEN: Final = 1
"""The token that ends a response, or a turn."""


class FunctionMachinesThere(Protocol):
    """They are the machines of one job's functions (``grid.FunctionGrid``)."""

    def hear(self, progress: Mapping[str, Any]) -> None: ...
    async def close(self) -> None: ...
    def end(self) -> None: ...


class Ground(Protocol):
    """The ground is what the world offers to the machines and processes in it."""

    scenario: Scenario
    seed: int
    root: Path
    loop: SimulatedLoop
    network: SimNetwork
    trace: Trace
    bodies: dict[SimProcess, Body]
    services: ServiceWatch
    ranks: RankWatch

    def rng(self, name: str) -> random.Random: ...
    def new_pid(self) -> int: ...
    def simulated_job(self, name: str) -> SimulatedJob: ...
    def record(self, job: str) -> JobRecord: ...
    def finding(self, sentence: str) -> None: ...
    def published(self, job: str) -> PublishedWeights: ...
    def escaped(self, process: str, event: str, error: BaseException | None) -> None: ...
    def function_machines(self) -> FunctionMachinesThere: ...
    def submit(self, jobs: list[JobConfig]) -> None: ...
    def progress_of(self, job: str) -> Callable[[Mapping[str, Any]], None]: ...
    def job_over(self, job: str, summary: dict[str, Any]) -> None: ...
    def run_over(self, job: str, summary: dict[str, Any]) -> None: ...


class Place(Machine, Protocol):
    """A place is what a machine offers to the processes on it."""

    world: Ground
    host: Host

    def forget(self, pid: int) -> None:
        """The process has ended."""
        ...


class Body:
    """A body is one life of one process on ``host``: what runs, its link, its actors, and what signals do to it."""

    def __init__(self, name: str, host: Host, world: Ground) -> None:
        self.name = name
        self.life = SimProcess(name)
        self.life.set(SIMULATED_HOST, host)
        self.transport: MemoryTransport | None = None
        self.system: ActorSystem | None = None
        self._world = world
        world.bodies[self.life] = self

    @property
    def alive(self) -> bool:
        return self.life.alive

    @property
    def halted(self) -> bool:
        return self.life.halted

    @property
    def peer_name(self) -> str:
        """Its name on the network; empty before it listens."""
        return "" if self.transport is None else self.transport.peer.name

    def halt(self, *, heartbeats: bool = False) -> None:
        """As SIGSTOP does. With ``heartbeats`` only its own code stands still, as while something holds the GIL."""
        self.life.halt()
        if self.transport is not None:
            self._world.network.halt(self.peer_name, heartbeats=heartbeats)

    def go_on(self) -> None:
        """As SIGCONT does."""
        if self.life.halted:
            self.life.go_on(self._world.loop)
            if self.transport is not None:
                self._world.network.go_on(self.peer_name)

    def end(self, *, silent: bool = False) -> None:
        """Nothing of it runs any more. ``silent``: its machine has lost power. Idempotent."""
        if not self.life.alive:
            return
        self._world.bodies.pop(self.life)
        self._world.loop.kill(self.life)
        if self.transport is not None:
            self.transport.abort(silent=silent)
            self._world.network.go_on(self.peer_name)
