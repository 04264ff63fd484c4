"""Endpoints: where a process may listen, and how one string leads to all three lanes.

    tcp://127.0.0.1:*        three ports that the system chooses; keys are needed, as other users may connect
    tcp://10.0.0.1:5555      ports 5555, 5556, 5557: signal, message, bulk; further sockets of the bulk lane behind them
    ipc:///run/x/head.sock   head.sock, head.sock.1, head.sock.2 …, in a directory that only this user can enter
    ipc://*                  the same in a fresh directory
    …?key=<hex>              appended to the advertised endpoint of a listener with keys: its public key

An endpoint names the signal lane; the handshake tells the dialer where the others are, on the same host.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Final

from transport.errors import HandshakeRefused, InsecureBind, MalformedInput
from transport.own_address import own_address

IPC_PATH_MAX_BYTES: Final = 107
_TCP: Final = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.%]+\]|[^:/\[\]]+|\*):(?P<port>\*|\d{1,5})")
_LANE_TCP: Final = re.compile(r"tcp://\*:(\d{1,5})")
_LANE_IPC: Final = re.compile(r"\.[1-9]")
_WILDCARDS: Final = ("*", "0.0.0.0", "[::]")  # noqa: S104  recognised, not bound
_HOST_HEADER: Final = re.compile(r"(?P<host>\[[0-9a-fA-F:]+\]|[^:\[\]]+)(:\d{1,5})?")
_KEY: Final = re.compile(r"[0-9a-f]{64,96}")


def split_key(endpoint: str) -> tuple[str, str | None]:
    """The address and the hex key of an endpoint.

    Raises:
        HandshakeRefused: the key is malformed.
    """
    address, mark, key = endpoint.partition("?key=")
    if mark and not _KEY.fullmatch(key):
        raise HandshakeRefused(f"endpoint {endpoint!r}: the key must be hexadecimal as the listener printed it")
    return address, key if mark else None


def check_dialed(endpoint: str) -> None:
    """Check that ``endpoint`` can be dialed at all.

    Raises:
        ValueError: it cannot; the message shows the expected form.
        HandshakeRefused: its key is malformed.
    """
    address, _ = split_key(endpoint)
    tcp = _TCP.fullmatch(address)
    if tcp is not None and tcp["port"] != "*":
        reachable = tcp["host"] != "*" and 0 < int(tcp["port"]) <= 65535
    else:
        reachable = address.startswith("ipc:///")
    if not reachable:
        raise ValueError(f"{endpoint!r} is no address: expected tcp://HOST:PORT, as the listener printed it")


def lane_binds(listen: str, *, secure: bool, sockets: int = 3, unguarded: bool = False) -> list[str]:
    """The endpoints to bind for the listen spec ``listen``: signal, message, and the rest of ``sockets`` for bulk.

    Args:
        secure: whether there are keys.
        unguarded: whether TCP on loopback is allowed without keys, though every user of this machine may connect.

    Raises:
        InsecureBind: users other than this one could connect, and there are no keys.
        ValueError: the spec is malformed.
    """
    if listen.startswith("ipc://"):
        path = _ipc_path(listen.removeprefix("ipc://"))
        return [f"ipc://{path}", *(f"ipc://{path}.{index}" for index in range(1, sockets))]
    match = _TCP.fullmatch(listen)
    if match is None:
        raise ValueError(f"listen {listen!r}: expected tcp://HOST:PORT, tcp://HOST:* or ipc:///PATH")
    host, port = match["host"], match["port"]
    if not secure and not (unguarded and is_loopback(host)):
        who = "other users of this machine" if is_loopback(host) else "other machines"
        raise InsecureBind(
            f"listen {listen!r}: {who} could connect without proving who they are; "
            "make keys with `headrace keys` and start with their directory, or listen at ipc:///PATH"
        )
    if port == "*":
        return [f"tcp://{host}:*"] * sockets
    first = int(port)
    if not 0 < first <= 65536 - sockets:
        raise ValueError(f"listen {listen!r}: port {first} and the next {sockets - 1} must lie within 1-65535")
    return [f"tcp://{host}:{first + index}" for index in range(sockets)]


def _ipc_path(path: str) -> str:
    if path == "*":
        path = str(Path(tempfile.mkdtemp(prefix="headrace-")) / "s")
    if len(path.encode()) + 2 > IPC_PATH_MAX_BYTES:
        raise ValueError(
            f"listen ipc://{path}: a socket path has at most {IPC_PATH_MAX_BYTES - 2} bytes; use a shorter directory"
        )
    directory = Path(path).parent
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (why := not_private(directory, others=0o077)) is not None:
        raise InsecureBind(f"listen ipc://{path}: {why}; use a directory of mode 0700, or ipc://* for a fresh one")
    return path


def not_private(directory: Path, *, others: int) -> str | None:
    """Reason why ``directory`` is unsafe for our sockets; None: it is a directory, no link, ours, closed to others.

    Args:
        others: mode bits that other users must not have: 0o077 for any access, 0o022 for writing.
    """
    try:
        found = directory.lstat()
    except OSError as error:
        return f"{directory}: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode):
        return f"{directory} is no directory but a link or a file, and may lead anywhere"
    if found.st_uid != os.geteuid():
        return f"{directory} was made by user {found.st_uid}, who may put there what they like"
    if stat.S_IMODE(found.st_mode) & others:
        return f"other users can {'enter' if others & 0o055 else 'write to'} {directory}"
    return None


def check_socket_is_ours(path: Path) -> None:
    """Check, before a Unix socket is dialed, that no other user listens there and could pose as our process.

    Raises:
        HandshakeRefused: another user listens there.
    """
    with contextlib.suppress(OSError):  # no socket there yet, which the dialer notices itself
        if (owner := path.stat().st_uid) != os.geteuid():
            raise HandshakeRefused(f"ipc://{path}: user {owner} listens there, and not one of your own processes")


def is_loopback_tcp(endpoint: str) -> bool:
    """Whether ``endpoint`` is TCP that only this machine can reach."""
    match = _TCP.fullmatch(endpoint.partition("?")[0])
    return match is not None and is_loopback(match["host"])


def host_of(endpoint: str) -> str:
    """The host of a TCP endpoint, without brackets; localhost for another kind, which is on this machine."""
    match = _TCP.fullmatch(endpoint.partition("?")[0])
    return match["host"].strip("[]") if match is not None else "localhost"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def names_loopback(host_header: str) -> bool:
    """Whether a Host header names this machine, with or without a port; a foreign DNS name that leads here does not."""
    host = _HOST_HEADER.fullmatch(host_header)
    return host is not None and is_loopback(host["host"])


def advertised(bound: str, key: str | None) -> str:
    """The endpoint to tell others: the bound one, with a wildcard replaced by our own address, and the key."""
    match = _TCP.fullmatch(bound)
    if match is not None and match["host"] in _WILDCARDS:
        bound = f"tcp://{own_address(also_v6=match['host'] == '[::]')}:{match['port']}"
    return bound if key is None else f"{bound}?key={key}"


def for_welcome(bound: list[str]) -> list[str]:
    """The lanes' endpoints as a WELCOME names them: without a host."""
    return [re.sub(r"tcp://(\[.*\]|[^:]+):", "tcp://*:", endpoint) for endpoint in bound]


def resolve_lane(dialed: str, lane: str) -> str:
    """The endpoint to dial for a lane that a WELCOME from ``dialed`` named.

    Raises:
        MalformedInput: the lane is not on the host or in the directory that was dialed.
    """
    tcp = _TCP.fullmatch(dialed)
    port = _LANE_TCP.fullmatch(lane)
    if tcp is not None and port is not None and 0 < int(port[1]) <= 65535:
        return f"tcp://{tcp['host']}:{port[1]}"
    if dialed.startswith("ipc://") and lane.startswith(dialed) and _LANE_IPC.fullmatch(lane[len(dialed) :]):
        return lane
    raise MalformedInput(f"the listener at {dialed} named {lane!r} as one of its lanes")
