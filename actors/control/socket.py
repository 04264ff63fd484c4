"""The control plane's sockets: ROUTER for the server, DEALER for the client, over ``transport/zmq/socket.py``.

Server and client need only ``ControlSocket``, so tests may use a fake. Nothing here blocks: a send returns whether it
was queued, and received messages come through a callback on the loop. A server either listens at a Unix socket that
only its own user can open, or has keys and an allow-list; anything else is refused.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

import structlog

from actors.control.keys import ControlKeys
from actors.host.plain_file import read_plain
from configs.limits import Limits
from configs.run_files import CONTROL_ENDPOINT
from transport.endpoints import advertised, check_socket_is_ours, is_loopback, not_private, split_key
from transport.errors import InsecureBind
from transport.rarely import worth_a_line
from transport.transport import Frame, SendOutcome
from transport.zmq.context import new_context
from transport.zmq.options import Curve, SocketOptions
from transport.zmq.own_keys import own_keys_for
from transport.zmq.security import NodeKeys, ZapAllowList
from transport.zmq.socket import Role, Sent, SocketEvent, ZmqSocket

log = structlog.get_logger("headrace.control")

IPC_PATH_BYTES_MAX: Final = 100
"""A Unix socket's path has 107 bytes at most; some are left for libzmq."""

_ENDPOINT_BYTES_MAX: Final = 4096
_FRAME_FACTOR: Final = 4
"""Largest frame, as a multiple of the largest request: up to there the sender is told, beyond it libzmq hangs up."""
_TCP: Final = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.%]+\]|[^:/\[\]\s]+|\*):(?P<port>\*|\d{1,5})")
_ANY: Final = re.compile(r"^tcp://(\*|0\.0\.0\.0):")
_ANY_V6: Final = re.compile(r"^tcp://\[::\]:")
_OUTCOME: Final = {Sent.SENT: SendOutcome.QUEUED, Sent.FULL: SendOutcome.FULL, Sent.GONE: SendOutcome.NO_LINK}


class ControlSocket(Protocol):
    """A control socket is a ROUTER, where the first frame is the client's identity, or a DEALER."""

    @property
    def endpoint(self) -> str:
        """The endpoint where clients connect, or to which this client does; a wildcard port is resolved."""
        ...

    def send(self, frames: Sequence[bytes]) -> SendOutcome:
        """QUEUED, FULL (try later) or NO_LINK (that client is gone)."""
        ...

    def close(self) -> None: ...


OnFrames = Callable[[list[bytes], str, str], None]
"""Called with a message's frames, the role of the client's key (empty: may do everything), and that key or empty."""
OpenSocket = Callable[[OnFrames], ControlSocket]
"""Binds or connects on the running loop."""


class _Server:
    """The server owns a ROUTER, a context, and an allow-list if there are keys."""

    def __init__(self, options: SocketOptions, on_frames: OnFrames, keys: ControlKeys | None, limits: Limits) -> None:
        def receive(frames: list[Frame]) -> None:
            key = bytes(frames[0]).decode("ascii", "replace")
            on_frames([bytes(frame) for frame in frames[1:]], keys.role_of(key) if keys else "", key)

        self.endpoint = ""
        self._linger_s = limits.control_linger_s
        self._context = new_context()
        self._allow_list = ZapAllowList(self._context, keys.for_allow_list(), limits) if keys else None
        self._refused = 0
        on_event = self._on_event if keys else None
        self._socket = ZmqSocket(self._context, Role.LISTENER, replace(options, with_user=True), receive, on_event)
        self._file: Path | None = None

    def _on_event(self, event: SocketEvent) -> None:
        """Log clients that show no keys; the allow-list logs those whose keys it refuses."""
        if event is SocketEvent.HANDSHAKE_FAILED:
            self._refused += 1
            if worth_a_line(self._refused):
                log.warning("a control client without the right keys is refused", times=self._refused)

    def bind(self, endpoint: str, key_hex: str | None) -> None:
        """Listen at ``endpoint``; a Unix socket is for its owner only. Raises OSError, InsecureBind."""
        if endpoint.startswith("ipc://"):
            file = Path(endpoint.removeprefix("ipc://"))
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if (why := not_private(file.parent, others=0o002)) is not None:
                raise InsecureBind(f"--control {endpoint}: {why}; name another place, or leave --control out")
            self._file = file
            self._file.unlink(missing_ok=True)  # left by a head that was killed
        bound = self._socket.bind(endpoint)
        if self._file is not None:
            self._file.chmod(0o600)
        self.endpoint = f"{bound}?key={key_hex}" if key_hex else bound

    def send(self, frames: Sequence[bytes]) -> SendOutcome:
        return _OUTCOME[self._socket.try_send(frames)]

    def close(self) -> None:
        if self._socket.closed:
            return
        self._socket.close(linger_s=self._linger_s)
        if self._allow_list is not None:
            self._allow_list.close()
        self._context.destroy(linger=int(self._linger_s * 1000))
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()


class _Client:
    """The client owns a DEALER and its context."""

    def __init__(
        self,
        options: SocketOptions,
        on_frames: OnFrames,
        linger_s: float,
        on_event: Callable[[SocketEvent], None] | None,
        on_writable: Callable[[], None] | None,
    ) -> None:
        def receive(frames: list[Frame]) -> None:
            on_frames([bytes(frame) for frame in frames], "", "")

        self.endpoint = ""
        self._linger_s = linger_s
        self._context = new_context()
        self._socket = ZmqSocket(self._context, Role.DIALER, options, receive, on_event, on_writable)

    def connect(self, endpoint: str) -> None:
        """Begin to connect. Raises ValueError if ``endpoint`` is malformed."""
        self._socket.connect(endpoint)
        self.endpoint = endpoint

    def send(self, frames: Sequence[bytes]) -> SendOutcome:
        return _OUTCOME[self._socket.try_send(frames)]

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.close(linger_s=self._linger_s)
            self._context.destroy(linger=int(self._linger_s * 1000))


def _options(limits: Limits, curve: Curve | None, max_frame_bytes: int) -> SocketOptions:
    return SocketOptions(
        hwm_messages=limits.control_event_queue,
        max_frame_bytes=max_frame_bytes,
        drain_max_messages=limits.drain_max_messages,
        drain_max_ms=limits.drain_max_ms,
        handshake_s=limits.connect_timeout_s,
        heartbeat_interval_s=limits.heartbeat_interval_s,
        heartbeat_timeout_s=limits.heartbeat_timeout_s,
        keepalive_s=limits.keepalive_s,
        curve=curve,
        stranger_bytes=limits.stranger_bytes,
        strangers_max=limits.strangers_max,
    )


def open_control_socket(endpoint: str, limits: Limits, *, keys: ControlKeys | None = None) -> OpenSocket:
    """Returns a function that binds the server's socket.

    Raises (when that function is called):
        InsecureBind: others could connect to ``endpoint``, and there are no keys.
        ValueError: ``endpoint`` is malformed.
        OSError: the address is taken or does not exist.
    """

    def open_socket(on_frames: OnFrames) -> ControlSocket:
        check_bind(endpoint, keys)
        curve = keys.pair.for_listener() if keys else None
        server = _Server(_options(limits, curve, limits.control_request_bytes * _FRAME_FACTOR), on_frames, keys, limits)
        try:
            server.bind(endpoint, keys.pair.public_hex if keys else None)
        except (OSError, InsecureBind):
            server.close()
            raise
        return server

    return open_socket


def dial_control_socket(
    endpoint: str,
    limits: Limits,
    *,
    keys: NodeKeys | None = None,
    on_event: Callable[[SocketEvent], None] | None = None,
    on_writable: Callable[[], None] | None = None,
) -> OpenSocket:
    """Returns a function that begins to connect a client's socket. ``endpoint`` has the server's key: ``…?key=<hex>``.

    Raises (when that function is called):
        ValueError: the endpoint is malformed, or it names a key and we have none.
        HandshakeRefused: another user listens at this Unix socket.
    """

    def open_socket(on_frames: OnFrames) -> ControlSocket:
        address, server_hex = split_key(endpoint)
        if keys is None and (own := own_keys_for(address, server_hex, "control")) is not None:
            return dial(address, own, own.public_hex, on_frames)
        if server_hex is not None and keys is None:
            raise ValueError(
                f"{address} wants keys: make a pair with headrace keys, have it allowed, and name it with --keys"
            )
        return dial(address, keys, server_hex, on_frames)

    def dial(address: str, keys: NodeKeys | None, server_hex: str | None, on_frames: OnFrames) -> ControlSocket:
        if address.startswith("ipc://") and os.geteuid() != 0:  # an administrator may look at another's run
            check_socket_is_ours(Path(address.removeprefix("ipc://")))
        curve = Curve(keys.public, keys.secret, bytes.fromhex(server_hex)) if keys and server_hex else None
        options = _options(limits, curve, limits.message_max_bytes)
        client = _Client(options, on_frames, limits.control_linger_s, on_event, on_writable)
        try:
            client.connect(address)
        except ValueError:
            client.close()
            raise
        return client

    return open_socket


def check_bind(endpoint: str, keys: ControlKeys | None) -> None:
    """Check that the server may listen at ``endpoint``, without binding it.

    Raises:
        InsecureBind: others could connect, and there are no keys.
        ValueError: ``endpoint`` is malformed.
    """
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        return
    tcp = _TCP.fullmatch(endpoint)
    if tcp is None:
        raise ValueError(f"--control {endpoint}: expected tcp://HOST:PORT or ipc:///PATH")
    if keys is None:
        who = "other users of this machine" if is_loopback(tcp["host"]) else "other machines"
        raise InsecureBind(
            f"--control {endpoint}: {who} could connect without proving who they are; listen at ipc:///PATH, or make "
            "keys with headrace keys control-keys --operator my-keys, and start with --control-keys control-keys"
        )


def for_others(endpoint: str) -> str:
    """A server's endpoint for clients on other machines: a wildcard address becomes this host's name."""
    address, key = split_key(endpoint)
    return advertised(address, key)


def for_this_machine(endpoint: str) -> str:
    """A server's endpoint for clients on this machine: a wildcard address becomes loopback, which needs no name."""
    return _ANY_V6.sub("tcp://[::1]:", _ANY.sub("tcp://127.0.0.1:", endpoint))


def default_endpoint(run_dir: Path, private: Path) -> str:
    """``control.sock`` in the run directory, or in ``private`` if that path is too long for a socket.

    ``private`` is a directory of ours with a short random name, so that no other user could have made it before us.
    """
    path = run_dir.resolve() / "control.sock"
    return f"ipc://{path if len(str(path).encode()) <= IPC_PATH_BYTES_MAX else private / 'control.sock'}"


def store_endpoint(run_dir: Path, endpoint: str) -> Path:
    """Write the endpoint of the run's control socket into a file for people and ``ctl``; returns the file."""
    file = run_dir / CONTROL_ENDPOINT
    file.write_text(endpoint + "\n", encoding="utf-8")
    return file


def read_endpoint(where: str) -> str:
    """``where`` itself if it is an endpoint, else the one stored in that run directory or file.

    Raises:
        FileNotFoundError: ``where`` is neither; the message says what was looked for.
    """
    if "://" in where:
        return where
    file = Path(where) / CONTROL_ENDPOINT if Path(where).is_dir() else Path(where)
    if not file.is_file():
        raise FileNotFoundError(
            f"{where!r} is neither an endpoint such as tcp://127.0.0.1:7000 nor a run directory with {CONTROL_ENDPOINT}"
        )
    return read_plain(file, _ENDPOINT_BYTES_MAX).decode(errors="replace").strip()
