"""The control plane's sockets: ROUTER for the server, DEALER for the client, over ``transport/zmq_socket.py``.

``ControlSocket`` is all that server and client lean on, so tests may bring a fake. Nothing here blocks: a send says what
became of it, and received messages come through a callback on the loop.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

from configs.limits import Limits
from transport.errors import InsecureBind
from transport.transport import Frame, SendOutcome
from transport.zmq_socket import (
    Curve,
    Role,
    Sent,
    SocketEvent,
    SocketOptions,
    ZmqSocket,
    new_context,
)

IPC_PATH_BYTES_MAX = 100
"""A Unix socket's path has 107 bytes at most; some are left for libzmq."""
ENDPOINT_FILE = "control.endpoint"

_OUTCOME = {
    Sent.SENT: SendOutcome.QUEUED,
    Sent.FULL: SendOutcome.FULL,
    Sent.GONE: SendOutcome.NO_LINK,
}


class ControlSocket(Protocol):
    """A ROUTER (the first frame is the client's identity) or a DEALER."""

    @property
    def endpoint(self) -> str:
        """Where it is bound or connected; a wildcard port is resolved."""
        ...

    def send(self, frames: Sequence[bytes]) -> SendOutcome:
        """QUEUED, FULL (try later) or NO_LINK (that client is gone)."""
        ...

    def close(self) -> None: ...


OnFrames = Callable[[list[bytes], str], None]
"""One message's frames, and the user that the client's keys name (empty without keys)."""
OpenSocket = Callable[[OnFrames], ControlSocket]
"""Binds or connects on the running loop."""


class _Socket:
    """A ZmqSocket with a context of its own."""

    def __init__(self, role: Role, options: SocketOptions, on_frames: OnFrames, on_event: Callable[[SocketEvent], None] | None,
                 on_writable: Callable[[], None] | None) -> None:  # fmt: skip
        def receive(frames: list[Frame]) -> None:
            on_frames([bytes(frame) for frame in frames], "")

        self._context = new_context()
        self.socket = ZmqSocket(
            self._context, role, options, receive, on_event, on_writable
        )
        self.endpoint = ""
        self.unlink: Path | None = None

    def send(self, frames: Sequence[bytes]) -> SendOutcome:
        return _OUTCOME[self.socket.try_send(frames)]

    def close(self) -> None:
        if self.socket.closed:
            return
        self.socket.close(linger_s=_LINGER_S)
        self._context.destroy(linger=int(_LINGER_S * 1000))
        if self.unlink is not None:
            with contextlib.suppress(OSError):
                self.unlink.unlink()


_LINGER_S = 0.2
"""Last words to a client on the same machine; more would hold up the end of a run."""
_FRAME_FACTOR = 4
"""Frames up to this many times the request bound are read, so that their sender can be told; beyond it libzmq cuts it off."""


def _options(
    limits: Limits, curve: Curve | None, max_frame_bytes: int
) -> SocketOptions:
    return SocketOptions(
        hwm_messages=limits.control_event_queue,
        max_frame_bytes=max_frame_bytes,
        drain_max_messages=limits.drain_max_messages,
        drain_max_ms=limits.drain_max_ms,
        handshake_s=limits.connect_timeout_s,
        heartbeat_interval_s=limits.heartbeat_interval_s,
        heartbeat_timeout_s=limits.heartbeat_timeout_s,
        curve=curve,
    )


def listener(
    endpoint: str, limits: Limits, *, curve: Curve | None = None
) -> OpenSocket:
    """Binds the server's socket when called.

    Raises (when called):
        InsecureBind: ``endpoint`` is reachable from other machines and there are no keys.
        OSError: the address is taken or does not exist.
    """

    def open_socket(on_frames: OnFrames) -> ControlSocket:
        if curve is None and not _is_local(endpoint):
            raise InsecureBind(
                f"the control socket at {endpoint} would be open to the network without keys: "
                "bind it to tcp://127.0.0.1 or ipc://, or make keys with headrace keys and hand them in"
            )
        options = _options(limits, curve, limits.control_request_bytes * _FRAME_FACTOR)
        socket = _Socket(Role.LISTENER, options, on_frames, None, None)
        try:
            path = (
                Path(endpoint.removeprefix("ipc://"))
                if endpoint.startswith("ipc://")
                else None
            )
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                path.unlink(missing_ok=True)  # left by a head that was killed
            socket.endpoint = socket.socket.bind(endpoint)
            if path is not None:
                path.chmod(0o600)
                socket.unlink = path
        except OSError:
            socket.close()
            raise
        return socket

    return open_socket


def dialer(
    endpoint: str,
    limits: Limits,
    *,
    curve: Curve | None = None,
    on_event: Callable[[SocketEvent], None] | None = None,
    on_writable: Callable[[], None] | None = None,
) -> OpenSocket:
    """Begins to connect a client's socket when called. Raises ValueError for an endpoint that is none."""

    def open_socket(on_frames: OnFrames) -> ControlSocket:
        socket = _Socket(
            Role.DIALER,
            _options(limits, curve, limits.message_max_bytes),
            on_frames,
            on_event,
            on_writable,
        )
        try:
            socket.socket.connect(endpoint)
        except ValueError:
            socket.close()
            raise
        socket.endpoint = endpoint
        return socket

    return open_socket


def _is_local(endpoint: str) -> bool:
    if not endpoint.startswith("tcp://"):
        return True
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1", "lo") or host.startswith("127.")


def default_endpoint(run_dir: Path) -> str:
    """``control.sock`` in the run directory, or in a private temporary directory if that path is too long for a socket."""
    path = run_dir.resolve() / "control.sock"
    if len(str(path).encode()) > IPC_PATH_BYTES_MAX:
        digest = blake2b(str(path).encode(), digest_size=6).hexdigest()
        path = Path(tempfile.gettempdir()) / f"headrace-{digest}" / "control.sock"
    return f"ipc://{path}"


def store_endpoint(run_dir: Path, endpoint: str) -> Path:
    """Write where the run's control socket is, for people and ``ctl``; returns the file."""
    file = run_dir / ENDPOINT_FILE
    file.write_text(endpoint + "\n", encoding="utf-8")
    return file


def read_endpoint(where: str) -> str:
    """An endpoint as it stands, or the one stored in a run directory.

    Raises:
        FileNotFoundError: ``where`` is neither; the message says what was looked for.
    """
    if "://" in where:
        return where
    file = Path(where) / ENDPOINT_FILE if Path(where).is_dir() else Path(where)
    if not file.is_file():
        raise FileNotFoundError(
            f"{where!r} is neither an endpoint such as tcp://127.0.0.1:7000 nor a run directory with {ENDPOINT_FILE}"
        )
    return file.read_text(encoding="utf-8").strip()
