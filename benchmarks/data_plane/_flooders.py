"""Those who have no business at a head's port, for `bench flood`: one kind of them a process.

    python -m benchmarks.data_plane._flooders KIND HOST PORT SERVER_KEY

    garbage      connects, says random bytes until it is cut off, and again, as fast as it can
    frames       speaks ZMTP, and announces and sends one huge frame on each of many connections
    connections  opens thousands, says nothing, and opens another one for each that is closed
    trickle      speaks ZMTP, a byte at a time
    handshakes   proves a key that nobody allows, again and again
    messages     is a ZeroMQ peer without keys, of random messages; at a listener that has none it is let in

Says ``ready``, floods until its standard input ends, then says how much of it there was.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from typing import Final

import zmq

from benchmarks._processes import on_uvloop, until_input_ends

GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
FRAME_BYTES: Final = 60_000_000
"""Size of a huge frame: below what one message may have, so that libzmq takes it."""
PIECE_BYTES: Final = 1 << 16
_PAUSE_S: Final = 0.01
_ANSWER_S: Final = 0.05
_TURN: Final = 256

Flood = Callable[["Flooder"], Awaitable[None]]


class Flooder:
    """At one port; ``count`` is of connections, or of messages."""

    def __init__(self, host: str, port: int, server_key: str) -> None:
        self.host, self.port, self.server_key = host, port, server_key
        self.count = 0
        self.rng = random.Random(0)

    async def connection(self) -> socket.socket:
        made = socket.socket()
        made.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(made, (self.host, self.port))
        except OSError:
            made.close()
            raise
        self.count += 1
        return made

    async def talk(self, say: Callable[[socket.socket], Awaitable[None]]) -> None:
        """A connection after another, each until it is cut off."""
        while True:
            try:
                with await self.connection() as made:
                    await say(made)
            except OSError:
                await asyncio.sleep(_PAUSE_S)


async def _garbage(flooder: Flooder) -> None:
    loop = asyncio.get_running_loop()

    async def say(made: socket.socket) -> None:
        while True:
            await loop.sock_sendall(made, flooder.rng.randbytes(PIECE_BYTES))

    await _many(flooder, 16, say)


async def _frames(flooder: Flooder) -> None:
    loop, piece = asyncio.get_running_loop(), os.urandom(PIECE_BYTES)

    async def say(made: socket.socket) -> None:
        await loop.sock_sendall(made, GREETING + b"\x06" + struct.pack(">Q", FRAME_BYTES))
        for _ in range(FRAME_BYTES // PIECE_BYTES):
            await loop.sock_sendall(made, piece)
        await loop.sock_recv(made, 4096)

    await _many(flooder, 64, say)


async def _trickle(flooder: Flooder) -> None:
    loop = asyncio.get_running_loop()

    async def say(made: socket.socket) -> None:
        for byte in GREETING:
            await loop.sock_sendall(made, bytes([byte]))
            await asyncio.sleep(1.0)

    await _many(flooder, 500, say)


async def _connections(flooder: Flooder) -> None:
    loop = asyncio.get_running_loop()

    async def say(made: socket.socket) -> None:
        while await loop.sock_recv(made, 4096):
            pass

    await _many(flooder, 3000, say)


async def _many(flooder: Flooder, count: int, say: Callable[[socket.socket], Awaitable[None]]) -> None:
    await asyncio.gather(*(flooder.talk(say) for _ in range(count)))


async def _handshakes(flooder: Flooder) -> None:
    context = zmq.Context()
    while True:
        dealers = [_dealer(context, flooder, with_keys=True) for _ in range(16)]
        await asyncio.sleep(_ANSWER_S)
        for dealer in dealers:
            dealer.close(linger=0)
        flooder.count += len(dealers)


async def _messages(flooder: Flooder) -> None:
    context, rng = zmq.Context(), flooder.rng
    dealers = [_dealer(context, flooder, with_keys=False) for _ in range(4)]
    lines = [[rng.randbytes(rng.randrange(2048)) for _ in range(rng.randrange(1, 5))] for _ in range(64)]
    while True:
        for dealer in dealers:
            with contextlib.suppress(zmq.Again):
                for _ in range(_TURN):
                    dealer.send_multipart(rng.choice(lines), zmq.DONTWAIT)
                    flooder.count += 1
        await asyncio.sleep(0)


def _dealer(context: zmq.Context[zmq.Socket[bytes]], flooder: Flooder, *, with_keys: bool) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    if with_keys:
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
        dealer.curve_serverkey = bytes.fromhex(flooder.server_key)
    dealer.connect(f"tcp://{flooder.host}:{flooder.port}")
    return dealer


FLOODS: Final[dict[str, Flood]] = {
    "garbage": _garbage,
    "frames": _frames,
    "connections": _connections,
    "trickle": _trickle,
    "handshakes": _handshakes,
    "messages": _messages,
}


async def _flood(kind: str, flooder: Flooder) -> None:
    print("ready", flush=True)
    flood = asyncio.ensure_future(FLOODS[kind](flooder))
    await until_input_ends()
    flood.cancel()
    print(flooder.count, flush=True)
    os._exit(0)  # thousands of sockets would take long to close in order


if __name__ == "__main__":
    on_uvloop(_flood(sys.argv[1], Flooder(sys.argv[2], int(sys.argv[3]), sys.argv[4])))
