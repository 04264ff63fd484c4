"""Every watch ends with exactly one Down, whatever happens to the target."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.core.actor import Actor, handles
from actors.core.errors import WrongHandler
from actors.core.message import Done, Message, message
from actors.core.system import ActorSystem
from actors.core.watch import Down, Gone
from configs.limits import DEFAULT_LIMITS
from tests.broken_links import break_link
from transport.address import ActorAddress, PeerId

Pair = tuple[ActorSystem, ActorSystem]


@message("test_watch.note")
class Note(Message):
    text: str


@message("test_watch.watch")
class Watch(Message):
    target: ActorAddress
    unwatch: bool = False


@message("test_watch.end")
class End(Message):
    crash: bool


class Watcher(Actor):
    def __init__(self) -> None:
        self.heard: list[str] = []
        self.downs: list[Down] = []
        self.one_more = asyncio.Event()

    @handles(Watch)
    async def watch(self, message: Watch) -> None:
        (self.ctx.unwatch if message.unwatch else self.ctx.watch)(message.target)

    @handles(Note)
    async def note(self, message: Note) -> None:
        self.heard.append(message.text)

    @handles(Down)
    async def down(self, message: Down) -> None:
        assert self.ctx.sender == message.address
        self.downs.append(message)
        self.heard.append("down")
        self.one_more.set()


class Target(Actor):
    def __init__(self, friend: ActorAddress | None = None) -> None:
        self.friend = friend

    @handles(End)
    async def end(self, message: End) -> None:
        if message.crash:
            raise ValueError("boom")
        self.ctx.stop("preempted")

    async def on_stop(self) -> None:
        if self.friend is not None:
            self.ctx.ref(self.friend).tell(Note(text="last words"))


async def watch(pair: Pair, target: ActorAddress, name: str = "watcher") -> tuple[Watcher, Any]:
    watcher = Watcher()
    ref = await pair[0].spawn(name, watcher)
    await ref.ask(Watch(target=target), Done)
    return watcher, ref


async def settle() -> None:
    """Let everything that is under way arrive: the network in memory needs a few turns of the loop, no time."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("crash", [False, True])
async def test_the_end_of_an_actor_is_told_once_with_its_reason(pair: Pair, crash: bool) -> None:
    target = await pair[1].spawn("target", Target())
    watcher, _ = await watch(pair, target.address)
    await settle()
    target.tell(End(crash=crash))
    async with asyncio.timeout(5):
        await watcher.one_more.wait()
    await settle()
    (down,) = watcher.downs
    assert down.address == target.address
    assert down.reason is (Gone.CRASHED if crash else Gone.STOPPED)
    assert down.detail == ("ValueError: boom" if crash else "preempted")


async def test_an_actor_that_never_was_is_unknown(pair: Pair) -> None:
    watcher, _ = await watch(pair, pair[1].address("nobody"))
    async with asyncio.timeout(5):
        await watcher.one_more.wait()
    await settle()
    assert [down.reason for down in watcher.downs] == [Gone.UNKNOWN_ACTOR]


async def test_an_actor_that_has_ended_is_unknown(pair: Pair) -> None:
    target = await pair[1].spawn("target", Target())
    await pair[1].stop_actor("target")
    watcher, _ = await watch(pair, target.address)
    async with asyncio.timeout(5):
        await watcher.one_more.wait()
    assert [down.reason for down in watcher.downs] == [Gone.UNKNOWN_ACTOR]


async def test_a_lost_link_means_unreachable(make_system: Any, network: Any) -> None:
    pair = await make_system("near"), await make_system("far")
    target = await pair[1].spawn("target", Target())
    watcher, ref = await watch(pair, target.address)
    await settle()
    break_link(network, "near", "far")
    async with asyncio.timeout(5):
        await watcher.one_more.wait()
    assert [down.reason for down in watcher.downs] == [Gone.UNREACHABLE]
    watcher.one_more.clear()
    await ref.ask(Watch(target=target.address), Done)
    await settle()
    target.tell(End(crash=False))
    async with asyncio.timeout(5):
        await watcher.one_more.wait()
    assert [down.reason for down in watcher.downs] == [Gone.UNREACHABLE, Gone.STOPPED]


async def test_a_peer_that_cannot_be_found_means_unreachable(make_system: Any) -> None:
    limits = DEFAULT_LIMITS.model_copy(update={"connect_timeout_s": 0.02})
    near = await make_system("near", limits=limits)
    nowhere = ActorAddress("a", PeerId("gone", 9), "memory://gone")
    watcher, _ = await watch((near, near), nowhere)
    async with asyncio.timeout(5):
        await watcher.one_more.wait()
    assert [down.reason for down in watcher.downs] == [Gone.UNREACHABLE]


async def test_a_newer_life_of_the_peer_means_that_the_older_one_is_unreachable(make_system: Any) -> None:
    near, far = await make_system("near"), await make_system("far", incarnation=5)
    await far.spawn("target", Target())
    older = ActorAddress("target", PeerId("far", 4), far.endpoint)
    watcher, _ = await watch((near, far), older)
    async with asyncio.timeout(5):
        await watcher.one_more.wait()
    assert [down.reason for down in watcher.downs] == [Gone.UNREACHABLE]


async def test_a_system_that_stops_in_good_order_means_stopped(make_system: Any) -> None:
    pair = await make_system("near"), await make_system("far")
    target = await pair[1].spawn("target", Target())
    watcher, _ = await watch(pair, target.address)
    await settle()
    await pair[1].stop()
    async with asyncio.timeout(5):
        await watcher.one_more.wait()
    assert [down.reason for down in watcher.downs] == [Gone.STOPPED]


async def test_last_words_are_heard_before_the_down(pair: Pair) -> None:
    watcher = Watcher()
    ref = await pair[0].spawn("watcher", watcher)
    target = await pair[1].spawn("target", Target(friend=ref.address))
    await ref.ask(Watch(target=target.address), Done)
    await settle()
    target.tell(End(crash=True))
    async with asyncio.timeout(5):
        await watcher.one_more.wait()
    assert watcher.heard == ["last words", "down"]


async def test_watching_twice_is_watching_once(pair: Pair) -> None:
    target = await pair[1].spawn("target", Target())
    watcher, ref = await watch(pair, target.address)
    await ref.ask(Watch(target=target.address), Done)
    await settle()
    assert len(pair[0]._router.deaths.held) == 1, "a second one would be left behind by unwatch"
    target.tell(End(crash=False))
    async with asyncio.timeout(5):
        await watcher.one_more.wait()
    await settle()
    assert len(watcher.downs) == 1


async def test_after_unwatch_no_down_comes(pair: Pair) -> None:
    target = await pair[1].spawn("target", Target())
    watcher, ref = await watch(pair, target.address)
    await ref.ask(Watch(target=target.address, unwatch=True), Done)
    target.tell(End(crash=False))
    await pair[1].wait_stopped("target", timeout_s=5)
    await settle()
    assert watcher.downs == []
    assert len(pair[0]._router.deaths.held) == len(pair[1]._router.deaths.watchers) == 0


async def test_unwatch_revokes_a_down_that_is_already_in_the_mailbox(make_system: Any) -> None:
    class Fickle(Watcher):
        @handles(Watch)
        async def watch(self, message: Watch) -> None:
            self.ctx.watch(message.target)
            self.ctx.unwatch(message.target)

    system = await make_system("near")
    fickle = Fickle()
    ref = await system.spawn("fickle", fickle)
    await ref.ask(Watch(target=system.address("nobody")), Done)
    await ref.ask(Note(text="behind it"), Done)
    assert fickle.heard == ["behind it"]


async def test_watches_of_an_ended_watcher_are_forgotten(pair: Pair) -> None:
    target = await pair[1].spawn("target", Target())
    await watch(pair, target.address)
    await settle()
    assert len(pair[1]._router.deaths.watchers) == 1
    await pair[0].stop_actor("watcher")
    await settle()
    assert len(pair[0]._router.deaths.held) == len(pair[1]._router.deaths.watchers) == 0


async def test_a_watcher_without_a_handler_for_down_is_a_bug_that_shows_at_once(make_system: Any) -> None:
    class Blind(Actor):
        async def on_start(self) -> None:
            with pytest.raises(WrongHandler):
                self.ctx.watch(self.ctx.self_address)

    await (await make_system("near")).spawn("blind", Blind())
