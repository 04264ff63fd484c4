"""Limits what strangers cost a listener with keys: the memory that they make us hold, and their number.

    accepted ─▶ waiting ─┬─▶ let in: libzmq has sent it READY, so its key is on the allow-list    no longer checked
                         ├─▶ has sent more than a handshake takes ─▶ its connection is shut down
                         └─▶ oldest of too many strangers         ─▶ the same

libzmq reads a whole frame of up to MAXMSGSIZE, also from a stranger, before it checks it: forty connections made a head
hold a gigabyte.

Invariants
- A peer that was let in is never shut down: the kernel says how many bytes each connection has acknowledged, and a peer
  that was let in has acknowledged more than ``GREETED_BYTES`` before it sends anything beyond the handshake.
- Only connections to this listener's own port are touched. libzmq may close a descriptor at any time and its number may
  be reused, so a check duplicates it first: the connection that is checked is the one that is shut down.
- Strangers that only wait are left to libzmq's handshake deadline. The timer runs exactly while strangers wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from typing import Final

GREETED_BYTES: Final = 270
"""Most bytes that a stranger is sent: greeting 64, CURVE's WELCOME 170, ERROR 12. READY is 67 more (RFC 23, RFC 26)."""
_LOOK_S: Final = 0.05
"""Seconds between two checks; a check of 512 strangers takes four milliseconds."""
_TCP_INFO: Final = getattr(socket, "TCP_INFO", None)
_INFO_BYTES: Final = 136
_ACKNOWLEDGED_AND_RECEIVED: Final = struct.Struct("=120xQQ")
"""Part of Linux's ``struct tcp_info``: tcpi_bytes_acked, tcpi_bytes_received."""


class Doorkeeper:
    """Guards one listening socket, on the running loop. ``port`` is known after ``bind``."""

    def __init__(self, *, stranger_bytes: int, strangers_max: int) -> None:
        self._stranger_bytes = stranger_bytes
        self._strangers_max = strangers_max
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, None] = {}
        """Strangers' descriptors of libzmq, in order of arrival."""
        self._timer: asyncio.TimerHandle | None = None
        self.port = 0
        self.shown_out = 0

    @property
    def waiting(self) -> int:
        """Number of connections that have not proven who they are, as of the last check."""
        return len(self._waiting)

    def accepted(self, descriptor: int) -> None:
        """Watch a connection that libzmq has accepted."""
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
            self._look_later()  # even if a check raised

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
        """Bytes that the other end has acknowledged and sent; None: this is no longer our connection."""
        assert _TCP_INFO is not None, "nobody waits where the kernel cannot be asked"
        try:
            if connection.getsockname()[1] != self.port:
                return None
            info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
        except (OSError, IndexError):
            return None
        return _ACKNOWLEDGED_AND_RECEIVED.unpack(info) if len(info) == _INFO_BYTES else None

    def _show_out(self, connection: socket.socket) -> None:
        """Shut the connection down, so that libzmq frees its memory."""
        self.shown_out += 1
        with contextlib.suppress(OSError):  # the other end has closed it
            connection.shutdown(socket.SHUT_RDWR)


def _held(descriptor: int) -> socket.socket | None:
    """A socket on our own duplicate of libzmq's descriptor; None if that is no socket any more."""
    try:
        held = os.dup(descriptor)
    except OSError:
        return None
    try:
        return socket.socket(fileno=held)
    except OSError:
        os.close(held)
        return None
