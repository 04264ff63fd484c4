"""A head's services on the memory transport: a real node agent whose processes are objects that are ready at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from actors.core.actor import Actor
from actors.core.system import ActorSystem
from configs.limits import Limits
from configs.services import ServiceConfig
from supervisors.machine.machine import LocalMachine
from supervisors.machine.membership.nodes import Nodes
from supervisors.machine.node_agent import NodeAgent, NodeOptions
from supervisors.machine.processes.held_sockets import Listening
from supervisors.machine.processes.process import Child, Launch
from supervisors.machine.processes.process_spec import ProcessSpec
from supervisors.sharing.services import Services
from supervisors.tree.messages import ProcessReady
from transport.address import ActorAddress, PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport

LIMITS = Limits(backoff_first_s=0.01, stop_timeout_s=2.0, ready_timeout_s=2.0, restart_max=2, start_attempts_max=2)


def config(name: str = "train-0", **changes: Any) -> ServiceConfig:
    return ServiceConfig.model_validate({"name": name, "memory_bytes": 1000, "threads": 1} | changes)


class Process(Child):
    """It obeys every signal at once."""

    def send_signal(self, number: int) -> None:
        self._ended(-number)

    def _signal_group(self, number: int) -> None:
        self._ended(-number)


class PretendMachine(LocalMachine):
    """Its processes are objects, which say that they are ready unless their actor is in ``unready``."""

    def __init__(self) -> None:
        super().__init__()
        self.system: ActorSystem
        self.specs: list[ProcessSpec] = []
        self.processes: dict[str, Process] = {}
        self.unready: set[str] = set()

    def launch(self, spec: Launch, listening: Listening | None = None) -> Child:
        order = ProcessSpec.decode(spec.stdin)
        self.specs.append(order)
        child = self.processes[order.args.name] = Process(len(self.specs), asyncio.get_running_loop())
        if order.args.name in self.unready:
            asyncio.get_running_loop().call_soon(child.kill)
        else:
            addresses = {order.args.name: ActorAddress(order.args.name, PeerId(order.peer, child.pid), "")}
            news = ProcessReady(name=order.name, pid=child.pid, incarnation=child.pid, addresses=addresses)
            self.system.ref(order.agent).tell(news)
        return child

    def is_stopped(self, pid: int) -> bool:
        return False

    def service_metrics(self, name: str, directory: Path) -> Actor:
        return Actor()


class World:
    """The head's machine, and lives of its head one after the other."""

    def __init__(self, run_root: Path) -> None:
        self.run_root = run_root
        self.network, self.machine = MemoryNetwork(), PretendMachine()
        self.news: list[tuple[str, str]] = []
        self.ready: list[str] = []
        """Services that were there, each time that one was."""
        self._lives = 0
        self._links: list[MemoryTransport] = []
        self._systems: list[ActorSystem] = []

    async def start(self) -> None:
        self.machine.system = ActorSystem(MemoryTransport(self.network, PeerId("machine", 1)), limits=LIMITS)
        await self.machine.system.start()
        options = NodeOptions(machine=self.machine)
        self.agent = (await self.machine.system.spawn("agent", NodeAgent("head", options))).address

    async def life(self) -> Services:
        """A life of the head; the one before it is cut off."""
        for link in self._links:
            link.abort()
        self._lives += 1
        self._links = [MemoryTransport(self.network, PeerId("head", self._lives))]
        system = ActorSystem(self._links[0], limits=LIMITS)
        await system.start()
        self._systems.append(system)
        nodes = Nodes("head")
        nodes.add_local("head", self.agent, slots=1)
        services = Services(
            nodes, self.machine, self.run_root, limits=LIMITS, on_news=self._hear, on_ready=self.ready.append
        )
        services.open(system, adopting=self._lives > 1)
        return services

    def _hear(self, service: str, news: str) -> None:
        self.news.append((service, news))

    async def stop(self) -> None:
        for system in self._systems:
            await system.stop()
        await self.machine.system.stop()
