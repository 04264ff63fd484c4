"""A service stays findable when its scheduler is restarted."""

from __future__ import annotations

import asyncio

import pytest

from actors.core.actor import Actor, handles
from actors.core.errors import StartFailed
from actors.core.message import Message, message
from actors.core.registered import RegisteredActor
from actors.core.system import ActorSystem
from tests.simulated import run_simulated
from transport.address import ActorAddress, PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport


@message("test_registered.offer")
class Offer(Message):
    name: str


@message("test_registered.taken")
class Taken(Message):
    pass


class Scheduler(Actor):
    """Knows only those who came to this life of it."""

    def __init__(self) -> None:
        self.known: list[str] = []

    @handles(Offer)
    async def offer(self, message: Offer) -> Taken:
        self.known.append(message.name)
        return Taken()


class Service(RegisteredActor):
    def __init__(self, scheduler: ActorAddress) -> None:
        self._at = scheduler
        self.times = 0

    async def on_start(self) -> None:
        await self.keep_registered(self._at, Offer(name="service"), Taken)

    async def registered(self) -> None:
        self.times += 1


def test_a_restarted_scheduler_hears_of_its_services_again() -> None:
    """The scheduler dies and stays away for a while; its next life, at the same address, is told without asking."""

    async def scenario() -> None:
        network = MemoryNetwork()
        near = ActorSystem(MemoryTransport(network, PeerId("near", 1)))
        far = ActorSystem(MemoryTransport(network, PeerId("far", 2)))
        await near.start()
        await far.start()
        first = await near.spawn("scheduler", Scheduler())
        service = Service(first.address)
        await far.spawn("service", service)
        await near.stop_actor("scheduler")
        sleeper = Scheduler()
        await asyncio.sleep(5.0)  # virtual: the service asks in vain meanwhile
        await near.spawn("scheduler", sleeper)
        await asyncio.sleep(20.0)
        assert sleeper.known == ["service"]
        assert service.times == 2
        await far.stop()
        await near.stop()

    run_simulated(scenario(), seed=1)


def test_a_service_that_starts_while_its_scheduler_is_restarted_waits_for_it() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        near = ActorSystem(MemoryTransport(network, PeerId("near", 1)))
        far = ActorSystem(MemoryTransport(network, PeerId("far", 2)))
        await near.start()
        await far.start()
        starting = asyncio.create_task(far.spawn("service", Service(near.address("scheduler"))))
        await asyncio.sleep(5.0)
        assert not starting.done()
        scheduler = Scheduler()
        await near.spawn("scheduler", scheduler)
        await starting
        assert scheduler.known == ["service"]
        await far.stop()
        await near.stop()

    run_simulated(scenario(), seed=1)


def test_a_service_whose_scheduler_never_comes_does_not_start() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        near = ActorSystem(MemoryTransport(network, PeerId("near", 1)))
        far = ActorSystem(MemoryTransport(network, PeerId("far", 2)))
        await near.start()
        await far.start()
        with pytest.raises(StartFailed, match="service did not start"):
            await far.spawn("service", Service(near.address("scheduler")))
        assert 30 <= asyncio.get_running_loop().time() < 60
        await far.stop()
        await near.stop()

    run_simulated(scenario(), seed=1)


def test_a_scheduler_whose_process_was_replaced_is_found_at_its_endpoint() -> None:
    """The scheduler's process is killed; the next one has its name and endpoint, and an incarnation of its own."""

    async def scenario() -> None:
        network = MemoryNetwork()
        links = MemoryTransport(network, PeerId("near", 1))
        near, far = ActorSystem(links), ActorSystem(MemoryTransport(network, PeerId("far", 2)))
        await near.start()
        await far.start()
        first = await near.spawn("scheduler", Scheduler())
        service = Service(first.address)
        await far.spawn("service", service)
        links.abort()
        await asyncio.sleep(5.0)
        next_life = ActorSystem(MemoryTransport(network, PeerId("near", 3)))
        await next_life.start()
        scheduler = Scheduler()
        at = await next_life.spawn("scheduler", scheduler)
        await asyncio.sleep(20.0)
        assert scheduler.known == ["service"]
        assert service.scheduler.address == at.address != first.address
        await far.stop()
        await next_life.stop()

    run_simulated(scenario(), seed=1)


def test_a_service_does_not_take_a_stranger_for_its_scheduler_and_stops_after_the_grace() -> None:
    """Somebody else listens at the endpoint now: whoever has another name is no successor."""

    async def scenario() -> None:
        network = MemoryNetwork()
        links = MemoryTransport(network, PeerId("near", 1))
        near, far = ActorSystem(links), ActorSystem(MemoryTransport(network, PeerId("far", 2)))
        await near.start()
        await far.start()
        first = await near.spawn("scheduler", Scheduler())
        await far.spawn("service", Service(first.address))
        links.abort()
        stranger = ActorSystem(MemoryTransport(network, PeerId("stranger", 3), listen="memory://near"))
        await stranger.start()
        scheduler = Scheduler()
        await stranger.spawn("scheduler", scheduler)
        ended = await far.wait_stopped("service", timeout_s=60.0)
        assert (ended.reason, scheduler.known) == ("orphaned", [])
        await far.stop()
        await stranger.stop()

    run_simulated(scenario(), seed=1)
