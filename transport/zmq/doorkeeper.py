"""Keeps what strangers cost a listener with keys small: what they make us hold, and how many of them there are.

    accepted ─▶ waiting ─┬─▶ let in: libzmq has sent it READY, so the allow-list has said yes    nobody looks any more
                         ├─▶ has sent more than a handshake takes ─▶ its connection is shut down
                         └─▶ one of too many, the first to come   ─▶ the same

libzmq reads a whole frame of up to MAXMSGSIZE before it looks at it, of strangers too: forty connections made a head
hold a gigabyte.

Invariants
- Who has been let in is never shut down: the kernel is asked how much each connection was sent and has acknowledged,
  and whoever was let in has acknowledged more than a handshake's questions before it sends anything else.
- Only connections to this listener's own port are touched. libzmq may close a descriptor at any time and its number
  become something else's, so a judgement takes hold of what it is about: who is asked is who is shown out.
- Strangers that only wait are left to libzmq's handshake deadline. Nothing runs while nobody waits, and somebody
  looks as long as anybody does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from typing import Final

GREETED_BYTES: Final = 270
"""Most that a stranger is sent: greeting 64, CURVE's WELCOME 170, ERROR 12. READY is 67 more (RFC 23, RFC 26)."""
_LOOK_S: Final = 0.05
"""Period of the looks; one at 512 strangers takes four milliseconds."""
_TCP_INFO: Final = getattr(socket, "TCP_INFO", None)
_INFO_BYTES: Final = 136
_ACKNOWLEDGED_AND_RECEIVED: Final = struct.Struct("=120xQQ")
"""Part of Linux's ``struct tcp_info``: tcpi_bytes_acked, tcpi_bytes_received."""


class Doorkeeper:
    """A doorkeeper guards one listening socket, on the running loop. ``port`` is known after ``bind``."""

    def __init__(self, *, stranger_bytes: int, strangers_max: int) -> None:
        self._stranger_bytes = stranger_bytes
        self._strangers_max = strangers_max
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, None] = {}
        """Descriptors of libzmq's, in the order in which they came."""
        self._timer: asyncio.TimerHandle | None = None
        self.port = 0
        self.shown_out = 0

    @property
    def waiting(self) -> int:
        """Connections that have not proven who they are, as of the last look."""
        return len(self._waiting)

    def accepted(self, descriptor: int) -> None:
        """libzmq has a new connection."""
        if _TCP_INFO is None:
            return
        self._waiting.pop(descriptor, None)
        self._waiting[descriptor] = None
        while len(self._waiting) > self._strangers_max:
            self._judge(next(iter(self._waiting)), one_too_many=True)
        self._look_later()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._waiting.clear()

    def _look_later(self) -> None:
        if self._timer is None and self._waiting:
            self._timer = self._loop.call_later(_LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        try:
            for descriptor in list(self._waiting):
                self._judge(descriptor, one_too_many=False)
        finally:
            self._look_later()  # whatever went wrong with one of them

    def _judge(self, descriptor: int, *, one_too_many: bool) -> None:
        connection = _held(descriptor)
        if connection is None:
            del self._waiting[descriptor]
            return
        with connection:
            told = self._ask(connection)
            if told is None or told[0] > GREETED_BYTES:
                del self._waiting[descriptor]
            elif one_too_many or told[1] > self._stranger_bytes:
                del self._waiting[descriptor]
                self._show_out(connection)

    def _ask(self, connection: socket.socket) -> tuple[int, int] | None:
        """Bytes that the other end has acknowledged and sent; None if this is no connection of ours any more."""
        assert _TCP_INFO is not None, "nobody waits where the kernel cannot be asked"
        try:
            if connection.getsockname()[1] != self.port:
                return None
            info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
        except (OSError, IndexError):
            return None
        return _ACKNOWLEDGED_AND_RECEIVED.unpack(info) if len(info) == _INFO_BYTES else None

    def _show_out(self, connection: socket.socket) -> None:
        """libzmq finds the connection ended, and frees what it held for it."""
        self.shown_out += 1
        with contextlib.suppress(OSError):  # it has hung up by itself
            connection.shutdown(socket.SHUT_RDWR)


def _held(descriptor: int) -> socket.socket | None:
    """What is behind libzmq's descriptor now, under one of ours; None if it is no socket any more."""
    try:
        held = os.dup(descriptor)
    except OSError:
        return None
    try:
        return socket.socket(fileno=held)
    except OSError:
        os.close(held)
        return None
