"""How a socket is set up: what differs between lanes, roles and keys. ``socket.py`` tells libzmq."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from configs.limits import Limits
from transport.transport import Lane

_NET: Final = Path("/proc/sys/net")


@dataclass(frozen=True)
class Curve:
    """A socket has these keys, as Z85. ``server``: the public key of the listener that a dialer expects, else None."""

    public: bytes
    secret: bytes
    server: bytes | None


@dataclass(frozen=True)
class SocketOptions:
    """Sockets differ in these options; ``lane_options`` makes the usual choice."""

    hwm_messages: int
    """Most messages that libzmq holds for a connection, each way; arriving ones have no bound beside heartbeats."""
    max_frame_bytes: int
    drain_max_messages: int
    drain_max_ms: float
    handshake_s: float
    heartbeat_interval_s: float | None = None
    heartbeat_timeout_s: float | None = None
    keepalive_s: float | None = None
    """Silence after which the kernel probes the other end; None: the system's default, which is mostly two hours."""
    zero_copy_receive: bool = False
    send_buffer_bytes: int | None = None
    """Size to ask the kernel for; None: the kernel tunes the buffer itself. See the function ``send_buffer_bytes``."""
    with_user: bool = False
    """Whether a message's frames begin with the user that the allow-list named for the sender; empty without keys."""
    routing_id: bytes | None = None
    curve: Curve | None = None
    stranger_bytes: int = 1 << 14
    strangers_max: int = 512
    """Most connections that have not authenticated yet, at a listener with keys: see ``doorkeeper.py``."""


def lane_options(
    lane: Lane, bound: int, limits: Limits, *, routing_id: bytes | None = None, curve: Curve | None = None
) -> SocketOptions:
    """Options of a lane's socket.

    Only the signal lane carries heartbeats: a receiver that is full on another lane stops reading it, pongs included,
    and would be taken for dead. libzmq's high-water mark is a quarter of our own bound, since our own queue holds the
    rest; on the bulk lane it is half, so that a pull can send its whole window without often being told FULL.
    """
    beats, bulk = lane is Lane.SIGNAL, lane is Lane.BULK
    return SocketOptions(
        hwm_messages=max(1, bound // 2 if bulk else bound // 4),
        max_frame_bytes=limits.message_max_bytes,
        drain_max_messages=limits.drain_max_messages,
        drain_max_ms=limits.drain_max_ms,
        handshake_s=limits.connect_timeout_s,
        heartbeat_interval_s=limits.heartbeat_interval_s if beats else None,
        # silence is noticed at the next beat, so the sum of both is what a watcher waits at most
        heartbeat_timeout_s=max(0.05, limits.heartbeat_timeout_s - limits.heartbeat_interval_s) if beats else None,
        keepalive_s=limits.keepalive_s,
        zero_copy_receive=bulk,
        send_buffer_bytes=send_buffer_bytes(limits.bulk_chunk_bytes) if bulk else None,
        routing_id=routing_id,
        curve=curve,
        stranger_bytes=limits.stranger_bytes,
        strangers_max=limits.strangers_max,
    )


def send_buffer_bytes(chunk_bytes: int, net: Path = _NET) -> int | None:
    """Size of a send buffer into which ``chunk_bytes`` fit at once; None: leave the size to the system.

        chunk ─▶ send ─▶ kernel's send buffer ─▶ wire        it fits: one call, and the I/O thread is done
                      └▶ a part, sleep, a part, sleep …      it does not: the thread wakes each time a third has gone

    By itself, the kernel lets a connection's buffer grow to 4 MiB including its bookkeeping, in which a chunk of 4 MiB
    does not quite fit. A size that is asked for is granted doubled (socket(7), SO_SNDBUF), and the buffer then grows no
    further. So this asks only where the system grants enough, and would not have let the buffer grow larger by itself.
    """
    try:
        granted_at_most_bytes = int((net / "core/wmem_max").read_text())
        tuned_at_most_bytes = int((net / "ipv4/tcp_wmem").read_text().split()[2])
    except (OSError, ValueError, IndexError):
        return None
    fits = granted_at_most_bytes >= chunk_bytes and 2 * chunk_bytes >= tuned_at_most_bytes
    return chunk_bytes if fits else None
