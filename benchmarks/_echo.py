"""The other end of `bench ask` and `bench tell`, in a process of its own: an actor, or a plain socket.

    python -m benchmarks._echo actor    an ActorSystem with an Echo actor, as any role process has one
    python -m benchmarks._echo socket   a ROUTER that sends every message back, drained as our transport drains

Prints its endpoint, then serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any, Final

import uvloop
import zmq

from actors.core.actor import Actor, handles
from actors.core.message import Message, message
from actors.core.system import ActorSystem
from configs.limits import DEFAULT_LIMITS
from transport.address import new_peer
from transport.link_faults import FaultableTransport
from transport.zmq_transport import ZmqTransport

DRAIN: Final = 64
"""Messages taken from a socket before the loop gets its turn, in ours as in the raw one."""
ECHO: Final = "echo"


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


class Echo(Actor):
    """Answers every Ping, and counts what it is told."""

    def __init__(self) -> None:
        self.told = 0

    @handles(Ping)
    async def ping(self, question: Ping) -> Pong:
        return Pong(payload=question.payload, told=self.told)

    @handles(Told)
    async def count(self, _: Told) -> None:
        self.told += 1


def new_system(name: str) -> ActorSystem:
    """An actor system over TCP on loopback, with every layer that a role process has."""
    links = ZmqTransport(new_peer(name), listen="tcp://127.0.0.1:*", cluster="bench", limits=DEFAULT_LIMITS)
    return ActorSystem(FaultableTransport(links, limits=DEFAULT_LIMITS, seed=0), limits=DEFAULT_LIMITS)


class RawSocket:
    """A plain socket on the loop: one wake-up drains at most ``DRAIN`` messages, and comes back for more."""

    def __init__(self, socket: zmq.Socket[Any], on_message: Callable[[list[bytes]], None]) -> None:
        self._socket, self._on_message = socket, on_message
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)

    def send(self, frames: list[bytes]) -> None:
        """Send, and look whether something came: a send may swallow the edge that would have told."""
        self._socket.send_multipart(frames, zmq.DONTWAIT)
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        for _ in range(DRAIN):
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._on_message(frames)
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self._socket.close(linger=0)


async def _serve_actor() -> None:
    system = new_system("echo")
    await system.start()
    await system.spawn(ECHO, Echo())
    _say(system.address(ECHO).endpoint, str(system.peer.name), str(system.peer.incarnation))
    await _until_input_ends()
    await system.stop()


async def _serve_socket() -> None:
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    raw = RawSocket(socket, lambda frames: raw.send(frames))
    _say(f"tcp://127.0.0.1:{port}")
    await _until_input_ends()
    raw.close()
    context.term()


def _say(*words: str) -> None:
    print(" ".join(words), flush=True)


async def _until_input_ends() -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_actor() if sys.argv[1] == "actor" else _serve_socket())
