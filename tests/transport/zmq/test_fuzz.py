"""Ten thousand random messages on every socket, from strangers and from linked peers: counted, and harmless."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable

import pytest
import zmq

from configs.limits import DEFAULT_LIMITS
from transport.address import PeerId, new_peer
from transport.transport import DownReason, Frame, Lane, SendOutcome
from transport.zmq.handshake import CODEC, HEAD, PROTOCOL_VERSION, Hello, Mark, control, routing_id
from transport.zmq.transport import ZmqTransport

MESSAGES = 10_000
Draw = Callable[[random.Random], list[bytes]]


class Receiver:
    def __init__(self) -> None:
        self.frames: list[list[bytes]] = []
        self.downs: list[DownReason] = []
        self.changed = asyncio.Event()

    def on_frames(self, peer: PeerId, lane: Lane, frames: list[Frame]) -> None:
        self.frames.append([bytes(frame) for frame in frames])
        self.changed.set()

    def on_peer_up(self, peer: PeerId) -> None:
        self.changed.set()

    def on_peer_down(self, peer: PeerId, reason: DownReason) -> None:
        self.downs.append(reason)
        self.changed.set()


def noise(rng: random.Random) -> list[bytes]:
    """Frames of any number and content."""
    return [rng.randbytes(rng.randrange(60)) for _ in range(rng.randrange(1, 5))]


def nearly_right(rng: random.Random) -> list[bytes]:
    """A head of the right size and kind, and noise where its body belongs."""
    head = HEAD.pack(rng.choice(list(Mark)), rng.randrange(1 << 32))
    return [head, *noise(rng)]


@pytest.fixture
async def linked() -> AsyncIterator[tuple[ZmqTransport, Receiver, ZmqTransport, Receiver]]:
    one, other = (
        ZmqTransport(new_peer(n), listen="tcp://127.0.0.1:*", unguarded=True, cluster="t", limits=DEFAULT_LIMITS)
        for n in "ab"
    )
    seen_one, seen_other = Receiver(), Receiver()
    await one.start(seen_one)
    await other.start(seen_other)
    await one.connect(other.endpoint, timeout_s=5)
    yield one, seen_one, other, seen_other
    await one.close(timeout_s=0.2)
    await other.close(timeout_s=0.2)


async def still_works(one: ZmqTransport, other: ZmqTransport, seen_other: Receiver) -> None:
    assert one.send(other.peer, Lane.MESSAGE, [b"unharmed"]) is SendOutcome.QUEUED
    async with asyncio.timeout(10):
        while seen_other.frames[-1:] != [[b"unharmed"]]:
            seen_other.changed.clear()
            await seen_other.changed.wait()


@pytest.mark.parametrize("draw", [noise, nearly_right])
@pytest.mark.parametrize("lane", list(Lane))
async def test_ten_thousand_random_messages_of_a_stranger_are_counted_and_harm_nobody(
    linked: tuple[ZmqTransport, Receiver, ZmqTransport, Receiver], lane: Lane, draw: Draw
) -> None:
    one, _, other, seen_other = linked
    rng = random.Random(int(lane))
    context = zmq.Context()
    try:
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(other._bound[lane])  # the lane's own socket
        for number in range(MESSAGES):
            while True:
                try:
                    stranger.send_multipart(draw(rng), zmq.DONTWAIT)
                    break
                except zmq.Again:
                    await asyncio.sleep(0.001)
            if number % 200 == 0:
                await asyncio.sleep(0)
        await still_works(one, other, seen_other)
        async with asyncio.timeout(10):
            # a goodbye is no error, since its link may be forgotten; noise hits that mark now and then
            while other.counters.malformed < MESSAGES * (0.999 if draw is noise else 0.5):
                await asyncio.sleep(0.01)
    finally:
        stranger.close()
        context.term()
    assert seen_other.frames == [[b"unharmed"]]
    assert seen_other.downs == []


async def test_bytes_that_are_no_zeromq_at_all_harm_nobody(
    linked: tuple[ZmqTransport, Receiver, ZmqTransport, Receiver],
) -> None:
    one, _, other, seen_other = linked
    rng = random.Random(5)
    for _ in range(60):
        for lane in Lane:
            host, _, port = other._bound[lane].removeprefix("tcp://").partition(":")
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(rng.randbytes(rng.randrange(1, 400)))
        await asyncio.sleep(0)
    await still_works(one, other, seen_other)
    assert seen_other.downs == []


class Impostor:
    """A dialer that is welcomed and then misbehaves."""

    def __init__(self, target: ZmqTransport) -> None:
        self.peer = new_peer("impostor")
        self._context = zmq.Context()
        self.sockets = [self._dealer(endpoint) for endpoint in target._bound]

    def _dealer(self, endpoint: str) -> zmq.Socket[bytes]:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.ROUTING_ID, routing_id(self.peer, 1))
        dealer.connect(endpoint)
        return dealer

    async def shake_hands(self, confirm: bytes = b"\x91\x00") -> None:
        hello = Hello(PROTOCOL_VERSION, CODEC, "t", self.peer.name, self.peer.incarnation, "tcp://127.0.0.1:1", 1)
        self.sockets[0].send_multipart([bytes(frame) for frame in control(Mark.HELLO, hello)])
        assert HEAD.unpack((await self.next(0))[0])[0] == Mark.WELCOME
        for dealer in self.sockets[1:]:
            dealer.send_multipart([HEAD.pack(Mark.CONFIRM, 0), confirm])
        assert HEAD.unpack((await self.next(0))[0])[0] == Mark.READY

    async def next(self, lane: int) -> list[bytes]:
        async with asyncio.timeout(5):
            while True:
                try:
                    return self.sockets[lane].recv_multipart(zmq.DONTWAIT)
                except zmq.Again:
                    await asyncio.sleep(0.005)

    def close(self) -> None:
        for dealer in self.sockets:
            dealer.close()
        self._context.term()


@pytest.mark.parametrize("lane", list(Lane))
async def test_a_linked_peer_that_sends_noise_is_cut_off_and_the_others_are_not(
    linked: tuple[ZmqTransport, Receiver, ZmqTransport, Receiver], lane: Lane
) -> None:
    one, _, other, seen_other = linked
    impostor = Impostor(other)
    rng = random.Random(9)
    try:
        await impostor.shake_hands()
        assert impostor.peer in other.peers()
        for number in range(2000):
            impostor.sockets[lane].send_multipart(noise(rng))
            if number % 100 == 0:
                await asyncio.sleep(0)
        async with asyncio.timeout(5):
            while not seen_other.downs:
                await asyncio.sleep(0.01)
        assert seen_other.downs == [DownReason.UNREACHABLE]
        assert other.counters.cut_off == 1
        assert other.peers() == [one.peer]
        await still_works(one, other, seen_other)
    finally:
        impostor.close()


async def test_a_confirm_of_more_sockets_than_there_are_is_malformed_and_makes_no_link(
    linked: tuple[ZmqTransport, Receiver, ZmqTransport, Receiver],
) -> None:
    one, _, other, seen_other = linked
    impostor = Impostor(other)
    before = other.counters.malformed
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await impostor.shake_hands(confirm=b"\x92\x00\x04")
        assert other.counters.malformed == before + 2, "on the message and on the bulk lane"
        assert other.peers() == [one.peer]
        await still_works(one, other, seen_other)
    finally:
        impostor.close()


async def test_a_gap_in_the_numbering_ends_the_link_and_a_repeat_is_dropped(
    linked: tuple[ZmqTransport, Receiver, ZmqTransport, Receiver],
) -> None:
    _, _, other, seen_other = linked
    impostor = Impostor(other)
    try:
        await impostor.shake_hands()
        for seq in (1, 2, 2, 1, 3, 5, 6):
            impostor.sockets[1].send_multipart([HEAD.pack(Mark.DATA, seq), str(seq).encode()])
        async with asyncio.timeout(5):
            while not seen_other.downs:
                await asyncio.sleep(0.01)
        assert seen_other.frames == [[b"1"], [b"2"], [b"3"]]
        assert seen_other.downs == [DownReason.UNREACHABLE]
        assert (other.counters.gaps, other.counters.duplicates) == (1, 2)
    finally:
        impostor.close()


async def test_a_hello_under_another_routing_id_is_refused_and_a_flood_of_hellos_is_bounded(
    linked: tuple[ZmqTransport, Receiver, ZmqTransport, Receiver],
) -> None:
    one, _, other, seen_other = linked
    context = zmq.Context()
    liar = context.socket(zmq.DEALER)
    liar.setsockopt(zmq.LINGER, 0)
    try:
        liar.connect(other._bound[0])
        for number in range(3000):
            hello = Hello(PROTOCOL_VERSION, CODEC, "t", "victim", number, "tcp://127.0.0.1:1", 1)
            liar.send_multipart([bytes(frame) for frame in control(Mark.HELLO, hello)])
            if number % 100 == 0:
                await asyncio.sleep(0)
        async with asyncio.timeout(10):
            while other.counters.malformed < 3000:
                await asyncio.sleep(0.01)
        await still_works(one, other, seen_other)
    finally:
        liar.close()
        context.term()
