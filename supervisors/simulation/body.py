"""What a simulated process consists of: what runs, its link to the network, its actors; and what signals do to it.

Body ◀─ SimulatedChild   a role process, owned by a node agent (children.py)
     ◀─ MainProcess      a head or a node agent's process, owned by the world (main_process.py)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.core.system import ActorSystem
from actors.weights.segments import SIMULATED_HOST, Host
from transport.memory_transport import MemoryTransport
from transport.sim.process import SimProcess

if TYPE_CHECKING:
    from supervisors.simulation.world import World


class Body:
    """One life of one process on ``host``."""

    def __init__(self, name: str, host: Host, world: World) -> None:
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
