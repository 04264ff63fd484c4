"""The other end of `bench ask`, `bench tell` and `bench stream`, in a process of its own: an actor, or a plain socket.

``python -m benchmarks.data_plane._echo`` and

    actor    an ActorSystem with an Echo actor, as any role process has one
    socket   a ROUTER that sends every message back, drained as our transport drains
    sink     a ROUTER that answers a frame GO only, with the number of frames it took before
    source   a ROUTER that answers [GO, count, size] with so many frames, as fast as they go

Prints its endpoint, then serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import numpy as np
import zmq

from actors.core.actor import Actor, concurrent, handles
from actors.core.message import Message, message
from actors.core.system import ActorSystem
from benchmarks._processes import on_uvloop, until_input_ends
from benchmarks.data_plane import _curve
from configs.limits import DEFAULT_LIMITS
from transport.address import new_peer
from transport.link_faults import FaultableTransport
from transport.zmq.security import NodeKeys
from transport.zmq.socket import Context
from transport.zmq.transport import ZmqTransport

DRAIN: Final = DEFAULT_LIMITS.drain_max_messages
"""Messages taken from a socket before the loop gets its turn, in ours as in the raw one."""
ECHO: Final = "echo"
GO: Final = b"go"
SHARED_BYTES: Final = 65536
FULL_RETRY_S: Final = 0.0005


@message("bench.ping")
class Ping(Message):
    """64 bytes of payload, as a control message has about."""

    payload: bytes = b"x" * 64


@message("bench.pong")
class Pong(Message):
    payload: bytes = b""
    told: int = 0


@message("bench.told")
class Told(Message):
    """One way."""

    payload: bytes = b"x" * 64
    sender: int = 0


@message("bench.start_count")
class StartCount(Message):
    """Count from 0 again, and note who has said how much when ``expected`` / 2 have come."""

    expected: int


@message("bench.get_counts")
class GetCounts(Message):
    """What came since StartCount."""


@message("bench.counts")
class Counts(Message):
    total: int
    by_sender: dict[int, int]
    at_half: dict[int, int]


@message("bench.flow")
class Flow(Message):
    """Opens a stream of ``items`` items of ``size_bytes`` bytes."""

    items: int
    size_bytes: int


@message("bench.item")
class Item(Message):
    data: np.ndarray


class Echo(Actor):
    """Answers every Ping, and counts what it is told."""

    def __init__(self) -> None:
        self.told = 0
        self.by_sender: Counter[int] = Counter()
        self.at_half: dict[int, int] = {}
        self.half = 0

    @handles(Ping)
    async def ping(self, question: Ping) -> Pong:
        return Pong(payload=question.payload, told=self.told)

    @handles(Told)
    async def count(self, told: Told) -> None:
        self.told += 1
        self.by_sender[told.sender] += 1
        if self.told == self.half:
            self.at_half = dict(self.by_sender)

    @handles(StartCount)
    async def start_count(self, question: StartCount) -> None:
        self.told, self.half = 0, question.expected // 2
        self.by_sender.clear()
        self.at_half = {}

    @handles(GetCounts)
    async def counts(self, _: GetCounts) -> Counts:
        return Counts(total=self.told, by_sender=dict(self.by_sender), at_half=self.at_half)

    @handles(Flow)
    @concurrent
    async def flow(self, question: Flow) -> AsyncIterator[Item]:
        data = np.zeros(question.size_bytes, np.uint8)
        for _ in range(question.items):
            yield Item(data=data)


def new_system(
    name: str,
    context: Context[Any] | None = None,
    *,
    cluster: str = "bench",
    bulk_sockets: int = 1,
    keys: NodeKeys | None = None,
) -> ActorSystem:
    """An actor system over TCP on loopback, with every layer that a role process has."""
    limits = DEFAULT_LIMITS.model_copy(update={"bulk_sockets": bulk_sockets})
    links = ZmqTransport(
        new_peer(name),
        listen="tcp://127.0.0.1:*",
        cluster=cluster,
        limits=limits,
        keys=keys or _curve.keys(),
        unguarded=True,
        context=context,
    )
    return ActorSystem(FaultableTransport(links, limits=limits, seed=0), limits=limits)


class RawSocket:
    """A plain socket on the loop: one wake-up drains at most ``DRAIN`` messages, and comes back for more."""

    def __init__(self, socket: zmq.Socket[Any], on_message: Callable[[list[bytes]], None]) -> None:
        self._socket, self._on_message = socket, on_message
        self._loop = asyncio.get_running_loop()
        self._looking = False
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)

    def send(self, frames: list[bytes]) -> None:
        """Send, and look whether something came: a send may swallow the edge that would have told."""
        self._socket.send_multipart(frames, zmq.DONTWAIT)
        self._look_soon()

    def try_send(self, frames: list[bytes]) -> bool:
        """Send unless libzmq is full; large frames are shared, not copied."""
        self._look_soon()
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT, copy=len(frames[-1]) < SHARED_BYTES)
        except zmq.Again:
            return False
        return True

    def _look_soon(self) -> None:
        if not self._looking:
            self._looking = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        self._drain()

    def _drain(self) -> None:
        for _ in range(DRAIN):
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._on_message(frames)
        self._look_soon()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self._socket.close(linger=0)


async def _serve_actor() -> None:
    system = new_system("echo")
    await system.start()
    await system.spawn(ECHO, Echo())
    _say(system.address(ECHO).endpoint, str(system.peer.name), str(system.peer.incarnation))
    await until_input_ends()
    await system.stop()


class _Sink:
    """Counts, and says how many when it is asked."""

    def __init__(self) -> None:
        self.socket: RawSocket
        self._count = 0

    def take(self, frames: list[bytes]) -> None:
        if frames[1] == GO:
            self.socket.send([frames[0], str(self._count).encode()])
            self._count = 0
        else:
            self._count += 1


class _Source:
    """Sends what it is asked for, as libzmq takes it."""

    def __init__(self) -> None:
        self.socket: RawSocket
        self._left = 0
        self._message: list[bytes] = []

    def take(self, frames: list[bytes]) -> None:
        route, _, count, size = frames
        self._left, self._message = int(count), [route, bytes(int(size))]
        self._pump()

    def _pump(self) -> None:
        for _ in range(DRAIN):
            if not self._left:
                return
            if not self.socket.try_send(self._message):
                asyncio.get_running_loop().call_later(FULL_RETRY_S, self._pump)
                return
            self._left -= 1
        asyncio.get_running_loop().call_soon(self._pump)


class _Mirror:
    """Sends everything back."""

    def __init__(self) -> None:
        self.socket: RawSocket

    def take(self, frames: list[bytes]) -> None:
        self.socket.send(frames)


async def _serve_socket(end: _Mirror | _Sink | _Source) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    _curve.secure_listener(socket)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    end.socket = RawSocket(socket, end.take)
    _say(f"tcp://127.0.0.1:{port}")
    await until_input_ends()
    end.socket.close()
    context.term()


def _say(*words: str) -> None:
    print(" ".join(words), flush=True)


if __name__ == "__main__":
    ends = {"socket": _Mirror, "sink": _Sink, "source": _Source}
    on_uvloop(_serve_actor() if sys.argv[1] == "actor" else _serve_socket(ends[sys.argv[1]]()))
