"""One ZeroMQ socket, driven by callbacks of one event loop; nothing in it is awaited.

    ZMQ_FD readable ─▶ _drain: at most N messages or T ms ─▶ on_message
                          └ more left ─▶ call_soon(_turn)      the loop stays fair
    try_send ─▶ SENT | FULL | GONE ─▶ _turn, in the next turn of the loop: at_turn_end callbacks, then one EVENTS check

Invariants
- ``ZMQ_FD`` is edge-triggered, and send, receive and reading EVENTS consume edges. So after every send and after every
  drain that stopped early, a drain is scheduled; no edge is ever waited for twice.
- ``on_writable`` is called by the drain after a send that said FULL. If libzmq is still full then, it is called again
  when ``ZMQ_FD`` is readable, or after ``_FULL_S``, since reading EVENTS may have consumed that edge. Asking in every
  turn of the loop would keep a core busy that libzmq needs to send.
- Every call is non-blocking. A send that cannot go out says FULL; nothing is queued here beyond libzmq's own bound.
- A callback that raises is reported to the loop's exception handler and harms neither the socket nor the others.
- The context is passed in, and used only from the loop's thread.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import functools
import os
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import zmq

from transport.transport import Frame
from transport.zmq.doorkeeper import Doorkeeper
from transport.zmq.options import Curve, SocketOptions

Context = zmq.Context

_COPY_THRESHOLD_BYTES: Final = 65536
"""Size below which a copy is cheaper than the bookkeeping of a shared buffer."""
_NEVER_BYTES: Final = 1 << 62
_FULL_S: Final = 0.002
_MONITOR_HWM: Final = 100_000
_NEVER_RECONNECT_MS: Final = 3_600_000
_KEEPALIVES: Final = 6
"""Unanswered probes of the kernel after which a connection is over."""
_FLAGS: Final = int(zmq.DONTWAIT)
_MORE: Final = int(zmq.DONTWAIT | zmq.SNDMORE)
_READABLE: Final = int(zmq.POLLIN)
_ACCEPTED: Final = int(zmq.EVENT_ACCEPTED)


class Role(enum.Enum):
    """A socket is one end of a single connection, or of many."""

    LISTENER = zmq.ROUTER
    """End of many connections; messages begin with the connection's routing id."""
    DIALER = zmq.DEALER
    """End of one connection."""


class Sent(enum.Enum):
    """A send ends in one of these ways."""

    SENT = "sent"
    FULL = "full"
    """Try again when ``on_writable`` has been called."""
    GONE = "gone"
    """There is no such connection, or no longer."""


class SocketEvent(enum.Enum):
    """libzmq's monitor reports these events."""

    DISCONNECTED = "disconnected"
    CONNECT_FAILED = "connect_failed"
    HANDSHAKE_FAILED = "handshake_failed"
    AUTH_FAILED = "auth_failed"


_EVENTS: Final[dict[int, SocketEvent]] = {
    int(zmq.EVENT_DISCONNECTED): SocketEvent.DISCONNECTED,
    int(zmq.EVENT_CLOSED): SocketEvent.CONNECT_FAILED,
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): SocketEvent.HANDSHAKE_FAILED,
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): SocketEvent.HANDSHAKE_FAILED,
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): SocketEvent.AUTH_FAILED,
}


def _option(socket: zmq.Socket[bytes], option: zmq.SocketOption) -> int:
    return cast("int", socket.getsockopt(option))


class ZmqSocket:
    """A socket and its monitor, driven by the running loop."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        role: Role,
        options: SocketOptions,
        on_message: Callable[[list[Frame]], None],
        on_event: Callable[[SocketEvent], None] | None = None,
        on_writable: Callable[[], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._options = options
        self._on_message = on_message
        self._on_event = on_event
        self._on_writable = on_writable
        self._scheduled = False
        self._stuck = False
        self._full_until: asyncio.TimerHandle | None = None
        """Timer while libzmq is full: sending goes on when it fires, or when ``ZMQ_FD`` is readable before that."""
        self._at_turn_end: list[Callable[[], None]] = []
        self.empties = 0
        """Number of times that a drain has found nothing left: when it grows, everything has been read."""
        self._first: zmq.Frame | None = None
        """First frame of the last received message, which names the sender's user."""
        self._socket = context.socket(role.value)
        # the backend's method, since pyzmq's wrapper around it costs as much as sending, for features we do not use
        self._send = functools.partial(zmq.backend.Socket.send, self._socket)
        self._monitor: zmq.Socket[bytes] | None = None
        self._doorkeeper: Doorkeeper | None = None
        self._configure()
        if role is Role.LISTENER and options.curve is not None:
            self._doorkeeper = Doorkeeper(stranger_bytes=options.stranger_bytes, strangers_max=options.strangers_max)
        if on_event is not None or self._doorkeeper is not None:
            self._watch(context)
        self._fd = _option(self._socket, zmq.FD)
        self._loop.add_reader(self._fd, self._readable)

    def _configure(self) -> None:
        options, socket = self._options, self._socket
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, options.hwm_messages)
        # Where there are heartbeats, libzmq must never stop reading: when the other end of a connection that it has
        # stopped reading closes, the next beat aborts the process (up to 4.3.5 at least, its issue 4841). So what a
        # peer sends while our loop is busy is bounded by what that peer may have under way.
        socket.setsockopt(zmq.RCVHWM, 0 if options.heartbeat_interval_s is not None else options.hwm_messages)
        socket.setsockopt(zmq.MAXMSGSIZE, options.max_frame_bytes)
        if options.send_buffer_bytes is not None:
            socket.setsockopt(zmq.SNDBUF, options.send_buffer_bytes)
        # Nothing may outlive its connection, so a dialer must not reconnect. Both official ways to say so (an interval
        # of -1, IMMEDIATE=1) also throw away what has been received and not yet read; an hour does not.
        socket.setsockopt(zmq.IMMEDIATE, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_RECONNECT_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(options.handshake_s * 1000))
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        if options.keepalive_s is not None:
            socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, max(1, int(options.keepalive_s)))
            socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, max(1, int(options.keepalive_s / _KEEPALIVES)))
            socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _KEEPALIVES)
        socket.setsockopt(zmq.BACKLOG, 1024)
        if socket.type == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        if options.routing_id is not None:
            socket.setsockopt(zmq.ROUTING_ID, options.routing_id)
        if options.heartbeat_interval_s is not None and options.heartbeat_timeout_s is not None:
            socket.setsockopt(zmq.HEARTBEAT_IVL, int(options.heartbeat_interval_s * 1000))
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(options.heartbeat_timeout_s * 1000))
        if options.curve is not None:
            self._secure(options.curve)

    def _secure(self, curve: Curve) -> None:
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, curve.public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, curve.secret)
        if curve.server is None:
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.ZAP_DOMAIN, b"headrace")
        else:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, curve.server)

    def _watch(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        address = f"inproc://monitor-{id(self):x}-{_option(self._socket, zmq.FD)}"
        mask = 0 if self._doorkeeper is None else _ACCEPTED
        if self._on_event is not None:
            for event in _EVENTS:
                mask |= event
        self._socket.monitor(address, mask)
        monitor = context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.LINGER, 0)
        # events are sent by libzmq's I/O thread, which would block on a full queue
        monitor.setsockopt(zmq.RCVHWM, _MONITOR_HWM)
        monitor.connect(address)
        self._monitor = monitor
        self._loop.add_reader(_option(monitor, zmq.FD), self._drain_monitor)
        self._loop.call_soon(self._drain_monitor)

    @property
    def closed(self) -> bool:
        return self._socket.closed

    def bind(self, endpoint: str) -> str:
        """Listen at ``endpoint``; returns it with the port that was chosen.

        Raises:
            OSError: the address is taken or does not exist (``zmq.ZMQError`` is converted).
        """
        if "[" in endpoint:
            self._socket.setsockopt(zmq.IPV6, 1)
        # a Unix socket is ours alone from its first moment
        mask = os.umask(0o077) if endpoint.startswith("ipc://") else None
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            fix = "; does another process listen there? choose another" if error.errno == errno.EADDRINUSE else ""
            raise OSError(error.errno, f"cannot listen at {endpoint}: {error.strerror}{fix}") from error
        finally:
            if mask is not None:
                os.umask(mask)
        bound = cast("bytes", self._socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        if self._doorkeeper is not None:
            self._doorkeeper.port = int(bound.rpartition(":")[2])
        return bound

    def connect(self, endpoint: str) -> None:
        """Begin to connect; success is silent, failure an event. There is no automatic second try.

        Raises:
            ValueError: the endpoint is malformed.
        """
        if "[" in endpoint:
            self._socket.setsockopt(zmq.IPV6, 1)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ValueError(f"endpoint {endpoint!r}: {error.strerror}") from error

    def try_send(self, frames: Sequence[Frame]) -> Sent:
        """Hand one message to libzmq. A frame of 64 KiB or more is shared, so its buffer must not change any more."""
        if self._socket.closed:
            return Sent.GONE
        if not self._scheduled:
            self.check_soon()
        send, last = self._send, len(frames) - 1
        try:
            for index, frame in enumerate(frames):
                send(frame, _FLAGS if index == last else _MORE, len(frame) < _COPY_THRESHOLD_BYTES)
        except zmq.Again:
            self._stuck = True
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.ETERM, zmq.ENOTSOCK):
                return Sent.GONE
            raise
        return Sent.SENT

    def check_soon(self) -> None:
        """Look for messages in the next turn, once for all sends of this turn, which may have consumed an edge."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def at_turn_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, at the start of the next turn, when all code of this turn has sent its messages."""
        self._at_turn_end.append(callback)
        self.check_soon()

    def _turn(self) -> None:
        self._scheduled = False
        if self._at_turn_end:
            callbacks, self._at_turn_end = self._at_turn_end, []
            for callback in callbacks:
                self._call(callback)
        self._drain()

    def _readable(self) -> None:
        """Take one message without reading EVENTS. Its receiver mostly sends next, and one check then serves both."""
        if self._socket.closed:
            return
        self._ask_again()
        frames = self._receive()
        if frames is None:
            self._found_empty()
        else:
            self._call(self._on_message, frames)
            self.check_soon()

    def _drain(self) -> None:
        if self._socket.closed:
            return
        # not the loop's clock, which stands still during a turn of uvloop
        deadline = time.monotonic() + self._options.drain_max_ms / 1000
        for _ in range(self._options.drain_max_messages):
            frames = self._receive() if self._holds_some() else None
            if frames is None:
                self._found_empty()
                return
            self._call(self._on_message, frames)
            if self._socket.closed:
                return
            if time.monotonic() > deadline:
                break
        self.check_soon()
        self._go_on_sending()

    def _found_empty(self) -> None:
        self.empties += 1
        self._go_on_sending()

    def _go_on_sending(self) -> None:
        if not self._stuck or self._on_writable is None or self._full_until is not None:
            return
        self._stuck = False
        self._call(self._on_writable)
        if self._stuck and not self._socket.closed:
            self._full_until = self._loop.call_later(_FULL_S, self._look_again)

    def _look_again(self) -> None:
        self._ask_again()
        self._drain()

    def _ask_again(self) -> None:
        if self._full_until is not None:
            self._full_until.cancel()
            self._full_until = None

    def _holds_some(self) -> bool:
        # Reading EVENTS makes libzmq process its pending commands, which a receive may skip, so that no edge is lost.
        # It also costs less than half of the exception that receiving from an empty socket raises.
        try:
            return bool(_option(self._socket, zmq.EVENTS) & _READABLE)
        except zmq.ZMQError:
            return False

    def _receive(self) -> list[Frame] | None:
        options, recv = self._options, self._socket.recv
        frames: list[Frame] = []
        try:
            if options.with_user:
                return _with_user(self._socket.recv_multipart(_FLAGS, copy=False))
            large = _COPY_THRESHOLD_BYTES if options.zero_copy_receive else _NEVER_BYTES
            part = self._first = recv(_FLAGS, False)
            while True:  # a Frame knows whether another one follows; asking the socket costs as much as receiving
                frames.append(part.bytes if len(part) < large else part.buffer)
                if not part.more:
                    return frames
                part = recv(_FLAGS, False)
        except zmq.ZMQError:
            return None

    def sender_key(self) -> bytes:
        """The key, as Z85, that the sender of the last received message has proven to hold; empty without keys."""
        return b"" if self._first is None else _user_of(self._first)

    def _drain_monitor(self) -> None:
        """Take a bounded number of events in one turn: strangers can cause them faster than we handle them."""
        for _ in range(self._options.drain_max_messages):
            monitor = self._monitor
            if monitor is None or monitor.closed:
                return
            try:
                frames = monitor.recv_multipart(_FLAGS)
            except zmq.Again:
                if not _option(monitor, zmq.EVENTS) & zmq.POLLIN:
                    return
                continue
            except zmq.ZMQError:
                return
            number, value = struct.unpack_from("=HI", frames[0])
            if number == _ACCEPTED and self._doorkeeper is not None:
                self._call(self._doorkeeper.accepted, value)
            event = _EVENTS.get(number)
            if event is not None and self._on_event is not None:
                self._call(self._on_event, event)
        self._loop.call_soon(self._drain_monitor)

    def _call(self, callback: Callable[..., None], *args: Any) -> None:
        try:
            callback(*args)
        except Exception as error:  # noqa: BLE001  a bug in a callback must not stop the drain
            self._loop.call_exception_handler({"message": "a transport callback raised", "exception": error})

    def close(self, *, linger_s: float) -> None:
        """Close; libzmq goes on sending what it holds for at most ``linger_s``."""
        if self._socket.closed:
            return
        self._loop.remove_reader(self._fd)
        self._ask_again()
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        if self._monitor is not None:
            self._loop.remove_reader(_option(self._monitor, zmq.FD))
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None
        self._socket.close(linger=int(linger_s * 1000))


def _with_user(parts: Sequence[zmq.Frame]) -> list[Frame]:
    return [_user_of(parts[0]), *(part.bytes for part in parts)]


def _user_of(part: zmq.Frame) -> bytes:
    try:
        return str(part.get("User-Id")).encode()
    except zmq.ZMQError:  # a connection without keys has no such property
        return b""
