"""A service stays findable when its hub is restarted."""

from __future__ import annotations

import asyncio

from actors.core.actor import Actor, handles
from actors.core.message import Message, message
from actors.core.registered import RegisteredActor
from actors.core.system import ActorSystem
from transport.address import ActorAddress, PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport
from transport.sim.loop import run_simulated


@message("test_registered.offer")
class Offer(Message):
    name: str


@message("test_registered.taken")
class Taken(Message):
    pass


class Hub(Actor):
    """Knows only those who came to this life of it."""

    def __init__(self) -> None:
        self.known: list[str] = []

    @handles(Offer)
    async def offer(self, message: Offer) -> Taken:
        self.known.append(message.name)
        return Taken()


class Service(RegisteredActor):
    def __init__(self, hub: ActorAddress) -> None:
        self._at = hub
        self.times = 0

    async def on_start(self) -> None:
        await self.keep_registered(self._at, Offer(name="service"), Taken)

    async def registered(self) -> None:
        self.times += 1


def test_a_restarted_hub_hears_of_its_services_again() -> None:
    """The hub dies and stays away for a while; its next life, at the same address, is told without asking."""

    async def scenario() -> None:
        network = MemoryNetwork()
        near = ActorSystem(MemoryTransport(network, PeerId("near", 1)))
        far = ActorSystem(MemoryTransport(network, PeerId("far", 2)))
        await near.start()
        await far.start()
        first = await near.spawn("hub", Hub())
        service = Service(first.address)
        await far.spawn("service", service)
        await near.stop_actor("hub")
        sleeper = Hub()
        await asyncio.sleep(5.0)  # virtual: the service asks in vain meanwhile
        await near.spawn("hub", sleeper)
        await asyncio.sleep(20.0)
        assert sleeper.known == ["service"]
        assert service.times == 2
        await far.stop()
        await near.stop()

    run_simulated(scenario(), seed=1)
