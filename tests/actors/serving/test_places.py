"""Where the model server finds others: it asks the head, and the head's next life after its death."""

from __future__ import annotations

import asyncio

from actors.core.actor import Actor, handles
from actors.core.system import ActorSystem
from actors.core.watch import Down
from actors.protocol.serving import FindProcess, ProcessFound
from actors.serving.places import Places
from tests.simulated import run_simulated
from transport.address import ActorAddress, PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport

SERVICE = ActorAddress("train-0", PeerId("head.service.train-0", 1))


class Head(Actor):
    """Answers as the head does, and counts the questions."""

    def __init__(self) -> None:
        self.asked = 0

    @handles(FindProcess)
    async def find(self, message: FindProcess) -> ProcessFound:
        self.asked += 1
        return ProcessFound(address=SERVICE)


class Server(Actor):
    """Lends its ctx, and hears as the model server does."""

    def __init__(self, head: ActorAddress) -> None:
        self._head = head

    async def on_start(self) -> None:
        self.places = Places(self.ctx, self._head)
        self.places.follow()

    @handles(Down)
    async def gone(self, message: Down) -> None:
        self.places.heard(message)


class HeadLife:
    """One life of the head's process, at the same endpoint as the others."""

    def __init__(self, network: MemoryNetwork, life: int) -> None:
        self.transport = MemoryTransport(network, PeerId("head", life), listen="memory://head")
        self.system = ActorSystem(self.transport)
        self.actor = Head()

    async def begin(self) -> None:
        await self.system.start()
        await self.system.spawn("places.serving", self.actor)

    async def kill(self) -> None:
        self.transport.abort()
        await self.system.stop()


def test_what_is_known_is_asked_once_and_after_the_heads_death_its_next_life_is_asked_and_told() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        first, second = HeadLife(network, 1), HeadLife(network, 2)
        await first.begin()
        system = ActorSystem(MemoryTransport(network, PeerId("head.serving.models", 1), listen="memory://models"))
        await system.start()
        metrics = first.system.address("metrics.serving")
        server = Server(first.system.address("places.serving"))
        await system.spawn("models", server)
        places = server.places
        assert [await places.find("train-0") for _ in range(3)] == [SERVICE] * 3
        assert (first.actor.asked, places.beside(metrics)) == (1, metrics)
        await first.kill()
        await asyncio.sleep(5)
        await second.begin()
        await asyncio.sleep(30)
        assert places.beside(metrics).peer == PeerId("head", 2), "what is told reaches the head's next life"
        places.forget("train-0", SERVICE)
        assert await places.find("train-0") == SERVICE
        assert second.actor.asked == 1
        await system.stop()
        await second.system.stop()

    run_simulated(scenario())
