"""Uses of libzmq besides sockets: a context for each transport, and keys."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import zmq
from zmq.utils import z85


def new_context(io_threads: int = 1) -> zmq.Context[zmq.Socket[bytes]]:
    """A context for one transport; libzmq gives each connection to the I/O thread with the fewest."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads)
    context.set(zmq.MAX_SOCKETS, 65536)
    return context


async def terminate(context: zmq.Context[zmq.Socket[bytes]], timeout_s: float) -> bool:
    """Wait, off the loop, until all that lingers in ``context`` is sent or given up; False after ``timeout_s``.

    It uses a thread of its own that nobody joins: a thread of the loop's executor would delay the end of the loop.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        if not ended.done():
            ended.set_result(None)

    def term() -> None:
        context.term()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell)

    threading.Thread(target=term, name="zmq-term", daemon=True).start()
    try:
        async with asyncio.timeout(timeout_s):
            await ended
    except TimeoutError:
        return False
    return True


def curve_keypair() -> tuple[bytes, bytes]:
    """A new (public, secret) pair, Z85."""
    return zmq.curve_keypair()


def curve_public(secret: bytes) -> bytes:
    """The public key that belongs to ``secret``, Z85."""
    return zmq.curve_public(secret)


def z85_encode(raw: bytes) -> bytes:
    """Raw key bytes as printable text."""
    return z85.encode(raw)
