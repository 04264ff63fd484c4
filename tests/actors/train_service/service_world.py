"""A training service and the trainers that ask it, each in a process of its own on the memory transport.

service       the real actor, over backends of the test's choosing
trainer of j  an empty actor through which a real ServiceBackend asks
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from actors.core.actor import Actor, handles
from actors.core.system import ActorSystem
from actors.core.watch import Down
from actors.protocol.training import QueryService, ServiceState
from actors.ranks.followers import NOBODY, Followers
from actors.roles import ServiceArgs
from actors.train_service.service import TrainService
from actors.trainer.backend import BackendSpec, TrainBackend
from actors.trainer.backends.service_backend import ServiceBackend, ServiceClient
from actors.trainer.backends.simulated_backend import SimulatedBackend
from configs.limits import DEFAULT_LIMITS, Limits
from configs.services import ServiceConfig
from transport.address import ActorAddress, PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport

SERVICE = "train-0"


class Asker(Actor):
    """Lends its ctx to a backend."""

    @handles(Down)
    async def down(self, message: Down) -> None: ...


class Trainer:
    """One life of a job's trainer: ``backend`` asks for it."""

    def __init__(
        self, system: ActorSystem, transport: MemoryTransport, backend: ServiceBackend, checkpoint_step: int
    ) -> None:
        self.system = system
        self.transport = transport
        self.backend = backend
        self.checkpoint_step = checkpoint_step
        self.resumed_step: int | None = None
        """Steps in the state that the service had kept, once it has attached."""

    async def attach(self, spec: BackendSpec | None = None) -> None:
        """Have its bundle made."""
        self.resumed_step = await self.backend.start(spec or spec_of(), checkpoint_step=self.checkpoint_step)

    async def kill(self) -> None:
        """It is gone from one moment to the next, and says nothing."""
        self.transport.abort()
        await self.system.stop()


class ServiceWorld:
    """Everything in one process of the test, but ``followers``, which a life of the service leads.

    ``make``: the backend of a kind; None: over those ranks.
    """

    def __init__(
        self,
        directory: Path,
        *,
        make: Callable[[str], TrainBackend] | None = lambda kind: SimulatedBackend(),
        followers: Callable[[], Followers] = lambda: NOBODY,
        limits: Limits = DEFAULT_LIMITS,
        **config: object,
    ) -> None:
        self.directory = directory
        self.make, self.followers = make, followers
        self.limits = limits
        sections = {"name": SERVICE, "backend": "simulated", "memory_bytes": 10**9, "device": "cpu", "threads": 1}
        self.config = ServiceConfig.model_validate(sections | config)
        self.network = MemoryNetwork()
        self.metrics: ActorAddress | None = None
        """Who is told of the service; None: nobody."""
        self._lives = 0
        self.is_there = asyncio.Event()
        self._trainers: list[Trainer] = []

    async def start(self) -> None:
        """Another life of the service, which listens elsewhere than the one before."""
        self._lives += 1
        endpoint = f"memory://service-{self._lives}"
        self.transport = MemoryTransport(
            self.network, PeerId(f"head.service.{SERVICE}", self._lives), listen=endpoint, limits=self.limits
        )
        self.system = ActorSystem(self.transport, limits=self.limits)
        await self.system.start()
        args = ServiceArgs(
            role="train_service", name=SERVICE, node="head", run_dir=str(self.directory),
            metrics=self.metrics or ActorAddress("metrics", self.system.peer), service=self.config.model_dump_json(),
        )  # fmt: skip
        self.service = TrainService(args, self.make, followers=self.followers() if self.config.ranks > 1 else NOBODY)
        await self.system.spawn(SERVICE, self.service)
        self.is_there.set()

    async def kill(self) -> None:
        """The service is gone from one moment to the next, and says nothing."""
        self.is_there.clear()
        self.transport.abort()
        self.service._notes.close = lambda: None  # the dead note nothing
        await self.system.stop()
        self.service._residency._stored._files.close()  # its lock ends with its process

    async def stop_in_order(self) -> None:
        """The service is told to end, as the head does when it ends itself."""
        self.is_there.clear()
        await self.system.stop()

    async def trainer(
        self,
        job: str,
        *,
        checkpoint_step: int = 0,
        run: str = "run",
        kind: str = "",
        priority: int = 0,
        share: float = 1.0,
    ) -> Trainer:
        """A trainer that has not attached yet; with the name of an earlier one it is its next life."""
        transport = MemoryTransport(
            self.network, PeerId(f"head.{job}.trainer", 1 + len(self._trainers)),
            listen=f"memory://trainer-{len(self._trainers)}", limits=self.limits,
        )  # fmt: skip
        system = ActorSystem(transport, limits=self.limits)
        await system.start()
        asker = Asker()
        await system.spawn("trainer", asker)
        client = ServiceClient(
            job=job,
            run=run,
            backend=kind or self.config.backend,
            ranks=self.config.ranks,
            priority=priority,
            share=share,
        )
        backend = ServiceBackend(client, self.system.address(SERVICE))
        backend.connect(asker.ctx)
        trainer = Trainer(system, transport, backend, checkpoint_step)
        self._trainers.append(trainer)
        return trainer

    async def attached(self, job: str, spec: BackendSpec | None = None, **how: object) -> Trainer:
        """A trainer whose bundle is there."""
        trainer = await self.trainer(job, **how)  # type: ignore[arg-type]
        await trainer.attach(spec)
        return trainer

    async def state(self) -> ServiceState:
        """What the service says to the head."""
        return await self.system.ref(self.system.address(SERVICE)).ask(QueryService(), ServiceState)

    async def stop(self) -> None:
        for trainer in self._trainers:
            await trainer.system.stop()
        await self.system.stop()


def spec_of(model_path: Path = Path("m"), **changes: object) -> BackendSpec:
    """What a job's trainer would ask for; ``changes`` are fields of it."""
    fields = {"model_path": model_path, "device": "auto", "threads": 0, "learning_rate": 0.01} | changes
    return BackendSpec(**fields)  # type: ignore[arg-type]


async def settled(rounds: int = 20) -> None:
    """Let everything that is due happen."""
    for _ in range(rounds):
        await asyncio.sleep(0)
