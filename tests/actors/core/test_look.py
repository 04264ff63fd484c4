"""What is to be seen in a process: who waits for whom, which messages found no receiver, how late its loop is."""

from __future__ import annotations

import asyncio
from typing import Any, Self

import pytest

from actors.core.actor import Actor, handles
from actors.core.errors import AskError
from actors.core.kernel.loop_lag import LoopLag
from actors.core.look import Look, Sight
from actors.core.message import Done, Message, message
from actors.core.system import ActorSystem
from actors.core.terms import TermGuard
from configs.limits import DEFAULT_LIMITS
from tests.simulated import run_simulated
from transport.address import ActorAddress, PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport


@message("test_look.order")
class Order(Message):
    term: int = 0
    take_s: float = 0.0


class Worker(Actor):
    def __init__(self) -> None:
        self.terms = TermGuard()
        self.terms.admit(5)

    @handles(Order)
    async def order(self, message: Order) -> None:
        self.terms.admit(message.term)
        await self.ctx.sleep(message.take_s)


class Window(Actor):
    @handles(Look)
    async def look(self, message: Look) -> Sight:
        return self.ctx.look(message)


class Town:
    """Two processes on one network; ``near`` asks, in ``far`` lives a worker behind a window."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        limits = DEFAULT_LIMITS.model_copy(update={"dead_letters_kept": 3})
        self.links = {
            name: MemoryTransport(self.network, PeerId(name, number), limits=limits)
            for number, name in enumerate(("near", "far"), 1)
        }
        self.near, self.far = (ActorSystem(links, limits=limits) for links in self.links.values())

    async def __aenter__(self) -> Self:
        for system in (self.near, self.far):
            await system.start()
        self.worker = self.near.ref((await self.far.spawn("worker", Worker())).address)
        self.window = self.near.ref((await self.far.spawn("window", Window())).address)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.near.stop()
        await self.far.stop()


def in_town(test: Any) -> Any:
    def runs() -> None:
        async def scenario() -> None:
            async with Town() as town:
                await test(town)

        run_simulated(scenario())

    runs.__name__, runs.__doc__ = test.__name__, test.__doc__
    return runs


@in_town
async def test_a_look_shows_who_works_since_when_and_not_the_look_itself(town: Town) -> None:
    asked = asyncio.ensure_future(town.worker.ask(Order(term=5, take_s=8.0), Done))
    await asyncio.sleep(3.0)
    sight = await town.window.ask(Look(), Sight)
    assert [(s.waiter, s.kind, s.what) for s in sight.stalls] == [("worker", "handler", "test_look.order")]
    assert sight.stalls[0].since_s == pytest.approx(3.0, abs=0.1)
    assert (await town.window.ask(Look(longer_than_s=5.0), Sight)).stalls == []
    (waits,) = [stall for stall in town.near.sight().stalls if stall.what == "test_look.order"]
    assert "worker" in waits.waits_for
    await asked
    assert (await town.window.ask(Look(), Sight)).stalls == []


@in_town
async def test_every_message_without_a_receiver_is_counted_once_by_its_reason(town: Town) -> None:
    far = town.worker.address.peer
    for _ in range(2):
        town.near.ref(ActorAddress("nobody", far, town.worker.address.endpoint)).tell(Order(term=5))
    town.near.ref(ActorAddress("ghost", town.near.peer, "")).tell(Order(term=5))
    await town.window.ask(Look(), Sight)
    with pytest.raises(AskError):
        await town.worker.ask(Order(term=4), Done)
    gone = ActorAddress("worker", PeerId("elsewhere", 9), "")
    town.near.ref(gone).tell(Order(term=5))
    sight = await town.window.ask(Look(), Sight)
    assert sight.dead_letter_counts == {"unknown_actor": 2, "stale_term": 1}
    assert town.near.sight().dead_letter_counts == {"unknown_actor": 1, "no_link": 1}
    newest = town.near.sight().dead_letters[0]
    assert (newest.reason, newest.tag, newest.target) == ("no_link", "test_look.order", f"worker@{gone.peer}")


@in_town
async def test_what_waits_for_a_link_that_is_never_made_is_a_dead_letter(town: Town) -> None:
    town.near.ref(ActorAddress("worker", PeerId("nowhere", 9), "memory://nowhere")).tell(Order(term=5))
    assert town.near.sight().dead_letter_counts == {}
    await asyncio.sleep(DEFAULT_LIMITS.connect_timeout_s + 1.0)
    assert town.near.sight().dead_letter_counts == {"link_lost": 1}


@in_town
async def test_what_waits_in_the_mailbox_of_an_actor_that_ends_is_a_dead_letter(town: Town) -> None:
    town.worker.tell(Order(term=5, take_s=3.0))
    town.worker.tell(Order(term=5))
    await town.window.ask(Look(), Sight)
    await town.far.stop_actor("worker")
    assert town.far.sight().dead_letter_counts == {"stopping": 1}


@in_town
async def test_only_the_newest_are_kept_and_all_are_counted(town: Town) -> None:
    far = town.worker.address.peer
    for number in range(5):
        town.near.ref(ActorAddress(f"nobody-{number}", far, town.worker.address.endpoint)).tell(Order())
        await asyncio.sleep(1.0)
    sight = await town.window.ask(Look(), Sight)
    assert sight.dead_letter_counts == {"unknown_actor": 5}
    assert [letter.target for letter in sight.dead_letters] == [f"nobody-{n}@{far}" for n in (4, 3, 2)]
    assert [round(letter.ago_s) for letter in sight.dead_letters] == [1, 2, 3]
    assert sight.dead_letters[0].source.endswith(f"@{town.near.peer}")


@in_town
async def test_no_lag_is_told_where_time_is_virtual(town: Town) -> None:
    assert (await town.window.ask(Look(), Sight)).loop_lag is None


async def test_the_lag_of_a_loop_is_told_as_median_and_tail() -> None:
    lag = LoopLag()
    assert lag.over_last_probes() is None
    lag._probes.extend([0.001] * 98 + [0.2, 0.5])  # pyright: ignore[reportPrivateUsage]
    told = lag.over_last_probes()
    assert told is not None
    assert (told.p50_s, told.p99_s, told.max_s) == (0.001, 0.5, 0.5)
