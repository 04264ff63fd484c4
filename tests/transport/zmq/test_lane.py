"""A lane with several sockets: dealt out in turn, put in order again, as many sockets as both ends have."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.limits import DEFAULT_LIMITS
from transport.address import PeerId, new_peer
from transport.transport import DownReason, Frame, Lane, SendOutcome
from transport.zmq.handshake import HEAD, Goodbye, Mark, control
from transport.zmq.lane import LaneOut
from transport.zmq.link import Counters, Link
from transport.zmq.packing import pack, packed
from transport.zmq.socket import Sent
from transport.zmq.transport import ZmqTransport

BULK = int(Lane.BULK)


class FakeSocket:
    """Takes so many messages, and keeps them."""

    def __init__(self, room: int = 1_000_000) -> None:
        self.room = room
        self.taken: list[list[Frame]] = []

    def try_send(self, frames: list[Frame]) -> Sent:
        if len(self.taken) >= self.room:
            return Sent.FULL
        self.taken.append(frames)
        return Sent.SENT

    def at_turn_end(self, callback: object) -> None:
        pass


def lane_of_fakes(*fakes: FakeSocket, bound: int = 16) -> LaneOut:
    return LaneOut(fakes, None, bound)  # type: ignore[arg-type]


class Received:
    """A link with ``sockets`` for its bulk lane, and what it has delivered."""

    def __init__(self, sockets: int) -> None:
        self.frames: list[list[Frame]] = []
        self.broken = 0
        self.counters = Counters()
        outs = {
            lane: lane_of_fakes(*(FakeSocket() for _ in range(sockets if lane is Lane.BULK else 1))) for lane in Lane
        }
        self.link = Link(
            PeerId("peer", 1), 1, True, outs, self.counters, 1024, self._deliver, self._on_broken, lambda _: None
        )  # fmt: skip

    def _deliver(self, peer: PeerId, lane: Lane, frames: list[Frame]) -> None:
        assert lane is Lane.BULK
        self.frames.append(frames)

    def _on_broken(self, link: Link) -> None:
        self.broken += 1

    def take(self, socket: int, seq: int) -> None:
        self.link.receive(BULK + socket, [HEAD.pack(Mark.DATA, seq), b"%d" % seq])


def in_order(count: int) -> list[list[bytes]]:
    return [[b"%d" % seq] for seq in range(1, count + 1)]


@given(st.integers(2, 4), st.integers(1, 40), st.randoms(use_true_random=False))
def test_whatever_socket_is_ahead_messages_are_delivered_once_and_in_order(sockets: int, count: int, rng: Any) -> None:
    received = Received(sockets)
    coming = {n: [seq for seq in range(1, count + 1) if seq % sockets == n] for n in range(sockets)}
    while any(coming.values()):
        socket = rng.choice([n for n, left in coming.items() if left])
        received.take(socket, coming[socket].pop(0))
    assert received.frames == in_order(count)
    assert received.counters == Counters()


def test_packs_of_several_messages_wait_for_their_turn_too() -> None:
    received = Received(2)
    late = pack(3, [packed([b"3"]) or b"", packed([b"4"]) or b""])
    received.link.receive(BULK + 1, [late])
    received.take(1, 6)
    assert received.frames == []
    received.link.receive(BULK, [pack(1, [packed([b"1"]) or b"", packed([b"2"]) or b""])])
    assert received.frames == in_order(4)
    received.take(0, 5)
    assert received.frames == in_order(6)


def test_a_repeat_of_what_waits_is_dropped_and_counted() -> None:
    received = Received(2)
    received.take(1, 2)
    received.take(1, 2)
    received.take(0, 1)
    received.take(0, 1)
    assert received.frames == in_order(2)
    assert received.counters.duplicates == 2


def test_when_too_many_wait_for_one_that_is_missing_it_is_a_gap() -> None:
    received = Received(2)
    for seq in range(2, 2 + 2048):
        received.take(1, seq)
    assert not received.broken
    received.take(1, 2 + 2048)
    assert (received.broken, received.counters.gaps, received.frames) == (1, 1, [])


def test_with_one_socket_what_is_missing_is_a_gap_at_once() -> None:
    received = Received(1)
    received.take(0, 2)
    assert (received.broken, received.counters.gaps) == (1, 1)


def test_a_peer_has_gone_when_it_has_said_goodbye_on_every_socket() -> None:
    received = Received(3)
    for socket in range(4):
        received.link.receive(socket, control(Mark.GOODBYE, Goodbye(DownReason.STOPPED)))
        assert not received.broken
    received.link.receive(4, control(Mark.GOODBYE, Goodbye(DownReason.STOPPED)))
    assert received.broken == 1


def test_messages_are_dealt_out_in_turn_also_while_one_socket_is_full() -> None:
    free, full = FakeSocket(), FakeSocket(room=1)
    lane = lane_of_fakes(free, full)
    for _ in range(6):
        assert lane.offer([bytes(100_000)]) is SendOutcome.QUEUED
    numbers = [[HEAD.unpack(frames[0])[1] for frames in socket.taken] for socket in (free, full)]
    assert numbers == [[1, 3, 5], [2]]
    assert lane.queued
    full.room = 10
    assert lane.flush()
    assert [HEAD.unpack(frames[0])[1] for frames in full.taken] == [2, 4, 6]
    assert lane.idle


def test_what_waits_for_all_sockets_together_is_bounded() -> None:
    lane = lane_of_fakes(FakeSocket(room=0), FakeSocket(room=0), bound=5)
    assert [lane.offer([bytes(100_000)]) for _ in range(7)] == [SendOutcome.QUEUED] * 5 + [SendOutcome.FULL] * 2


class Collector:
    """What arrives on the bulk lane."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.changed = asyncio.Event()

    def on_frames(self, peer: PeerId, lane: Lane, frames: list[Frame]) -> None:
        self.frames.append(bytes(frames[0]))
        self.changed.set()

    def on_peer_up(self, peer: PeerId) -> None: ...

    def on_peer_down(self, peer: PeerId, reason: DownReason) -> None: ...

    async def until(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.frames) < count:
                self.changed.clear()
                await self.changed.wait()


async def started(name: str, bulk_sockets: int) -> tuple[ZmqTransport, Collector]:
    limits = DEFAULT_LIMITS.model_copy(update={"bulk_sockets": bulk_sockets})
    transport = ZmqTransport(new_peer(name), listen="tcp://127.0.0.1:*", unguarded=True, cluster="t", limits=limits)
    collector = Collector()
    await transport.start(collector)
    return transport, collector


@pytest.mark.parametrize(("dialer", "listener"), [(3, 1), (1, 3), (2, 4), (3, 3)])
async def test_a_link_has_as_many_sockets_as_the_end_with_fewer_and_keeps_the_order_both_ways(
    dialer: int, listener: int
) -> None:
    one, seen_one = await started("one", dialer)
    other, seen_other = await started("other", listener)
    try:
        await one.connect(other.endpoint, timeout_s=5)
        assert one.peers() == [other.peer]
        frames = [b"%d" % number * (70_000 if number % 3 else 1) for number in range(60)]
        for source, target, seen in ((one, other, seen_other), (other, one, seen_one)):
            for frame in frames:
                while source.send(target.peer, Lane.BULK, [frame]) is SendOutcome.FULL:
                    await asyncio.sleep(0.001)
            await seen.until(len(frames))
            assert seen.frames == frames
        for transport, peer in ((one, other.peer), (other, one.peer)):
            assert len(transport._links.by_peer[peer].sockets) == 2 + min(dialer, listener)
    finally:
        await one.close(timeout_s=0.5)
        await other.close(timeout_s=0.5)
