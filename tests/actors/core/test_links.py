"""Sending under pressure: what must arrive waits for room, in order; and what finds no room breaks the link."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from actors.core.kernel.links import Links
from configs.limits import DEFAULT_LIMITS
from transport.address import PeerId
from transport.envelope import Envelope, Kind, decode_envelope
from transport.errors import LinkTimeout
from transport.transport import DownReason, Frame, Lane, Receiver, SendOutcome

PEER = PeerId("far", 2)
LIMITS = DEFAULT_LIMITS.model_copy(update={"message_queue_frames": 4})


class Narrow:
    """A transport that takes ``room`` messages."""

    peer = PeerId("near", 1)
    endpoint = "memory://near"

    def __init__(self, room: int) -> None:
        self.room = room
        self.linked = True
        self.sent: list[int] = []
        self.disconnected: list[DownReason] = []

    def send(self, peer: PeerId, lane: Lane, frames: Sequence[Frame]) -> SendOutcome:
        if not self.linked:
            return SendOutcome.NO_LINK
        if self.room == 0:
            return SendOutcome.FULL
        self.room -= 1
        self.sent.append(decode_envelope(frames[0]).request_id)
        return SendOutcome.QUEUED

    async def connect(self, endpoint: str, *, timeout_s: float) -> PeerId:
        raise LinkTimeout("nobody there")

    async def start(self, receiver: Receiver) -> None: ...
    async def close(self, *, timeout_s: float) -> None: ...

    def disconnect(self, peer: PeerId, reason: DownReason = DownReason.STOPPED) -> None:
        self.disconnected.append(reason)

    def peers(self) -> list[PeerId]:
        return [PEER]


class Silent(Narrow):
    """Nobody answers for now."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.linked = False

    async def connect(self, endpoint: str, *, timeout_s: float) -> PeerId:
        return await asyncio.get_running_loop().create_future()


def links_on(transport: Narrow, lost: list[int] | None = None) -> tuple[Links, list[PeerId]]:
    """``lost`` gets the numbers of those that were queued and will not be sent."""
    unreachable: list[PeerId] = []
    gone = [] if lost is None else lost
    return Links(
        transport,
        LIMITS,
        lambda _: None,
        lambda peer, _: unreachable.append(peer),
        lambda _, envelope: gone.append(envelope.request_id),
    ), unreachable


def send(links: Links, number: int, *, surely: bool, endpoint: str = "", lane: Lane = Lane.MESSAGE) -> SendOutcome:
    envelope = Envelope(kind=Kind.REPLY, request_id=number)
    return links.send(PEER, endpoint, lane, envelope, [], surely=surely)


async def until(transport: Narrow, count: int) -> None:
    async with asyncio.timeout(5):
        while len(transport.sent) < count:
            await asyncio.sleep(0.001)


async def test_what_must_arrive_waits_for_room_and_nothing_overtakes_it() -> None:
    transport = Narrow(room=1)
    links, _ = links_on(transport)
    assert send(links, 1, surely=True) is SendOutcome.QUEUED
    assert send(links, 2, surely=True) is SendOutcome.QUEUED
    transport.room = 1
    assert send(links, 3, surely=False) is SendOutcome.QUEUED, "it queues behind the second, though there is room"
    assert transport.sent == [1]
    transport.room = 5
    await until(transport, 3)
    assert transport.sent == [1, 2, 3]
    assert send(links, 4, surely=False) is SendOutcome.QUEUED
    assert transport.sent == [1, 2, 3, 4], "the outbox is gone"


async def test_a_tell_that_finds_no_room_is_told_so() -> None:
    links, _ = links_on(Narrow(room=0))
    assert send(links, 1, surely=False) is SendOutcome.FULL


async def test_what_must_arrive_and_finds_the_outbox_full_breaks_the_link() -> None:
    transport = Narrow(room=0)
    links, _ = links_on(transport)
    for number in range(LIMITS.message_queue_frames):
        assert send(links, number, surely=True) is SendOutcome.QUEUED
    assert send(links, 99, surely=True) is SendOutcome.FULL
    assert transport.disconnected == [DownReason.UNREACHABLE], "what we cut is no goodbye"


@pytest.mark.parametrize("up_at_once", [False, True])
async def test_what_must_arrive_and_finds_the_outbox_full_breaks_off_the_connecting_too(up_at_once: bool) -> None:
    """Else the link would come up and carry all but that one."""
    lost: list[int] = []
    transport = Silent(room=100)
    links, unreachable = links_on(transport, lost)
    numbers = list(range(LIMITS.message_queue_frames))
    for number in numbers:
        assert send(links, number, surely=True, endpoint="memory://far") is SendOutcome.QUEUED
    assert send(links, 98, surely=True) is SendOutcome.FULL
    assert send(links, 99, surely=True) is SendOutcome.FULL
    assert unreachable == [], "nobody is called back from within a send"
    if up_at_once:
        transport.linked = True
        links.on_peer_up(PEER)
    await asyncio.sleep(0.01)
    assert (lost, unreachable, links.is_queueing(PEER)) == (numbers, [PEER], False)
    transport.linked = True
    links.on_peer_up(PEER)
    assert transport.sent == []
    assert transport.disconnected == [DownReason.UNREACHABLE], "should the link have come up meanwhile"
    assert send(links, 100, surely=True) is SendOutcome.QUEUED
    assert transport.sent == [100]


async def test_a_failed_connect_gives_up_what_waited_for_it() -> None:
    transport = Narrow(room=5)
    transport.linked = False
    links, unreachable = links_on(transport)
    assert send(links, 1, surely=False, endpoint="memory://far") is SendOutcome.QUEUED
    assert links.is_queueing(PEER)
    for _ in range(3):
        await asyncio.sleep(0)
    assert unreachable == [PEER]
    assert not links.is_queueing(PEER)


async def test_a_peer_that_was_replaced_is_not_connected_to_again() -> None:
    transport = Narrow(room=5)
    transport.linked = False
    links, _ = links_on(transport)
    links.on_peer_down(PEER, DownReason.REPLACED)
    assert send(links, 1, surely=False, endpoint="memory://far") is SendOutcome.NO_LINK


async def test_a_peer_that_was_taken_for_replaced_and_is_linked_again_is_connected_to_again() -> None:
    """A link comes up with the life that rules only, so whoever is linked has not been replaced."""
    transport = Narrow(room=5)
    transport.linked = False
    links, _ = links_on(transport)
    links.on_peer_down(PEER, DownReason.REPLACED)
    links.on_peer_up(PEER)
    links.on_peer_down(PEER, DownReason.UNREACHABLE)
    assert send(links, 1, surely=False, endpoint="memory://far") is SendOutcome.QUEUED


async def test_what_waited_for_room_on_a_link_that_is_lost_is_accounted_for_when_another_lane_finds_out() -> None:
    lost: list[int] = []
    transport = Narrow(room=0)
    links, _ = links_on(transport, lost)
    assert send(links, 1, surely=True) is SendOutcome.QUEUED
    assert send(links, 2, surely=True) is SendOutcome.QUEUED
    transport.linked = False
    assert send(links, 3, surely=True, endpoint="memory://far", lane=Lane.SIGNAL) is SendOutcome.QUEUED
    assert lost == [1, 2], "they were for the link that is gone"
    transport.linked, transport.room = True, 5
    links.on_peer_up(PEER)
    await asyncio.sleep(0.02)
    assert (transport.sent, lost) == ([3], [1, 2]), "and the new one starts without them"
