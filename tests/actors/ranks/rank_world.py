"""A rank group in virtual time: scheduler, leader and followers, each a process of its own on the memory transport."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Self

from actors.core.actor import Actor, handles
from actors.core.system import ActorSystem
from actors.core.watch import Down
from actors.protocol.failures import Acknowledged
from actors.protocol.services import LookupService, RegisterService, ServiceFound
from actors.protocol.who_may_send import guard_for
from actors.ranks.group import GroupFollowers
from actors.ranks.rank import Rank
from actors.roles import RoleArgs
from configs.limits import Limits
from configs.names import rank_name
from tests.smallest_job import smallest_job
from transport.address import ActorAddress, PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport

JOB = smallest_job().model_dump_json()
NOBODY = ActorAddress("nobody", PeerId("nowhere", 1))


class Adder:
    """A follower that answers with its rank and the sum of the order's bytes, and does what some orders say."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.served: list[bytes] = []
        self.may_go_on = asyncio.Event()
        self.failure: Exception | None = None
        self.closed = False

    async def serve(self, order: bytes) -> bytes:
        self.served.append(order)
        if order == b"wait":
            async with asyncio.timeout(3600):
                await self.may_go_on.wait()
        if self.failure is not None:
            raise self.failure
        return bytes([self.rank]) + str(sum(order)).encode()

    async def close(self) -> None:
        self.closed = True


class Registry(Actor):
    """As the scheduler, of which a group needs no more."""

    def __init__(self) -> None:
        self.services: dict[str, ActorAddress] = {}

    @handles(RegisterService)
    async def register(self, offer: RegisterService) -> Acknowledged:
        self.services[offer.role] = offer.address
        return Acknowledged()

    @handles(LookupService)
    async def look(self, question: LookupService) -> ServiceFound:
        return ServiceFound(address=self.services.get(question.role))


class LeaderActor(Actor):
    """Lends its ctx to the followers, as a trainer does."""

    def __init__(self, followers: GroupFollowers) -> None:
        self._followers = followers

    async def on_start(self) -> None:
        self._followers.connect(self.ctx)

    @handles(Down)
    async def down(self, message: Down) -> None:
        self._followers.heard(message)


class Process:
    """One life of a process."""

    def __init__(self, network: MemoryNetwork, name: str, life: int, limits: Limits) -> None:
        self.links = MemoryTransport(network, PeerId(name, life), listen=f"memory://{name}-{life}", limits=limits)
        self.system = ActorSystem(self.links, limits=limits, guard=guard_for(PeerId(name, life)))

    async def kill(self) -> None:
        """It is gone from one moment to the next, and says nothing."""
        self.links.abort()
        await self.system.stop()


class RankWorld:
    """Everything in one process of the test: ``async with`` it."""

    def __init__(self, size: int = 3) -> None:
        self.size, self.limits = size, Limits()
        self.network = MemoryNetwork()
        self.processes: list[Process] = []
        self.adders: dict[int, Adder] = {}
        self.ranks: dict[int, Process] = {}
        self._lives = 0

    async def __aenter__(self) -> Self:
        self.head = await self.process("head")
        self.registry = Registry()
        self.scheduler = (await self.head.system.spawn("scheduler.j", self.registry)).address
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self.processes:
            with contextlib.suppress(Exception):
                await process.system.stop()

    async def process(self, name: str) -> Process:
        self._lives += 1
        process = Process(self.network, name, self._lives, self.limits)
        await process.system.start()
        self.processes.append(process)
        return process

    def _args(self, role: str, rank: int) -> RoleArgs:
        return RoleArgs(
            role=role, name=rank_name("trainer", rank), node="head", job=JOB, model_path="", run_dir="",
            scheduler=self.scheduler, metrics=NOBODY, rank=rank, size=self.size, leader="trainer", kind="test",
        )  # fmt: skip

    async def follower(self, rank: int, node: str = "head") -> Adder:
        self.ranks[rank] = await self.process(f"{node}.j.trainer.rank{rank}")
        self.adders[rank] = Adder(rank, self.size)
        args = self._args("rank", rank)
        await self.ranks[rank].system.spawn(args.name, Rank(args, self.adders[rank]))
        return self.adders[rank]

    async def leader(self, process: str = "head.j.trainer") -> GroupFollowers:
        self.leads = await self.process(process)
        followers = GroupFollowers(self._args("trainer", 0))
        await self.leads.system.spawn("trainer", LeaderActor(followers))
        return followers

    async def whole(self) -> GroupFollowers:
        for rank in range(1, self.size):
            await self.follower(rank)
        return await self.leader()

    async def end_of(self, rank: int, timeout_s: float = 3600.0) -> BaseException | None:
        """By which error that rank ended; 0: the leader."""
        system = self.ranks[rank].system if rank else self.leads.system
        return (await system.wait_stopped(rank_name("trainer", rank), timeout_s)).error


def orders(*texts: str) -> Sequence[bytes]:
    return [text.encode() for text in texts]
