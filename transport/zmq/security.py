"""Keys: who a node is (CURVE), and whom it lets in (a ZAP allow-list).

A key directory holds ``node.secret`` (mode 0600), ``node.public`` and ``allowed/<name>.public``, one file per node that
may connect. Keys are Z85 text of 40 characters on disk, hexadecimal in endpoints.

Invariants
- CURVE alone proves the listener only; without the allow-list any client key is accepted. So a listener with keys
  always runs the allow-list, and a dialer connects only to listeners whose key it allows.
- A secret that others can read is refused, not repaired.
- A name belongs to a key: a node registered as ``gpu`` may be called ``gpu`` or ``gpu-<anything>``, and its processes
  ``<node name>.<anything>``. ``head`` and ``machine`` belong to the head's key, whatever it is registered as.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import structlog

from configs.limits import Limits
from transport.errors import HandshakeRefused, TransportError
from transport.rarely import worth_a_line
from transport.transport import Frame
from transport.zmq.context import curve_keypair, curve_public, z85_encode
from transport.zmq.options import Curve, SocketOptions
from transport.zmq.socket import Context, Role, ZmqSocket

log = structlog.get_logger("headrace.transport")

ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")
_Z85: Final = re.compile(rb"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_OF_THE_HEAD: Final = frozenset(["head", "machine"])
"""Names of the head's own processes, up to the first dot."""


class KeyFileError(TransportError):
    """A key file is missing, unreadable or readable by others. Configuration; do not retry."""


@dataclass(frozen=True)
class NodeKeys:
    """A node has a key pair and a list of public keys that it lets connect, as Z85. Its own key is always allowed."""

    public: bytes
    secret: bytes
    allowed: frozenset[bytes] = frozenset()
    names: tuple[tuple[str, bytes], ...] = ()
    """Names that the allowed keys are registered as, each with its key."""
    head: bytes = b""
    """Public key of the head: besides our own key, only this one may use the head's names. Empty in the head itself."""

    def __repr__(self) -> str:
        return f"NodeKeys(public={self.public.decode()}, allowed={len(self.allowed)})"

    @property
    def public_hex(self) -> str:
        """The public key as endpoints carry it."""
        return self.public.hex()

    def allows(self, public: bytes) -> bool:
        """Whether a node with this key may connect."""
        return public == self.public or public in self.allowed

    def objection(self, name: str, public: bytes) -> str | None:
        """Why a process that has proven to hold the key ``public`` may not be called ``name``; None if it may.

        Our own key belongs to the user of this node, whose processes may have any name.
        """
        if public == self.public:
            return None
        node = name.partition(".")[0]
        if node in _OF_THE_HEAD:
            return None if public == self.head else f"{name} is a name of the head, and this key is not the head's"
        if public == self.head:
            return f"this key is the head's, and {name} is no name of the head"
        fitting = [known for known, _ in self.names if node == known or node.startswith(f"{known}-")]
        closest = max(fitting, key=len, default="")
        if (closest, public) in self.names:
            return None
        own = " or ".join(known for known, key in self.names if key == public) or "nothing"
        return f"this key is registered as {own}: start the node with --name {own}, or {own}- and more, not {name}"

    @property
    def registered(self) -> tuple[tuple[str, str], ...]:
        """The names that the allowed keys are registered as, each with its key as endpoints carry it."""
        return tuple((name, key.hex()) for name, key in self.names)

    def with_neighbours(self, neighbours: Sequence[tuple[str, str]]) -> NodeKeys:
        """A copy that also allows the keys that the head has named. A name already known here keeps its key."""
        known = {name for name, _ in self.names}
        more = tuple((name, bytes.fromhex(key)) for name, key in neighbours if name not in known)
        return replace(self, allowed=self.allowed | {key for _, key in more}, names=self.names + more)

    def of_head(self, head_hex: str | None) -> NodeKeys:
        """A copy for a process whose head has this public key; None: our own key is the head's."""
        return replace(self, head=bytes.fromhex(head_hex) if head_hex else b"")

    def for_listener(self) -> Curve:
        return Curve(self.public, self.secret, None)

    def for_dialer(self, server_hex: str | None, endpoint: str) -> Curve:
        """Options of a socket that dials the listener with this key.

        Raises:
            HandshakeRefused: the endpoint names no key, or one that is not allowed here.
        """
        if server_hex is None:
            raise HandshakeRefused(
                f"endpoint {endpoint!r} names no key: use the full endpoint as the listener printed it"
            )
        server = bytes.fromhex(server_hex)
        if not self.allows(server):
            raise HandshakeRefused(
                f"the key of {endpoint!r} is not allowed here: add it to allowed/ of the key directory"
            )
        return Curve(self.public, self.secret, server)


def generate_keys() -> NodeKeys:
    """A new pair that allows nobody else yet."""
    public, secret = curve_keypair()
    return NodeKeys(public, secret)


def write_keys(keys: NodeKeys, directory: Path) -> None:
    """Write a pair to ``directory`` (made with mode 0700); the secret with mode 0600.

    Raises:
        KeyFileError: there is a pair already; it is never overwritten.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    (directory / "allowed").mkdir(mode=0o700, exist_ok=True)
    secret = directory / "node.secret"
    try:
        descriptor = os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise KeyFileError(f"{secret} exists: remove it yourself if it is no longer needed") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(keys.secret + b"\n")
    (directory / "node.public").write_bytes(keys.public + b"\n")


def allow(directory: Path, name: str, public: bytes) -> None:
    """Let the node ``name`` with this public key connect, from the next load on.

    Raises:
        ValueError: the name cannot be a file name.
        KeyFileError: ``public`` is not a key.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"node name {name!r}: expected letters, digits, dot, dash, underscore")
    path = directory / "allowed" / f"{name}.public"
    _check(public, path)
    path.write_bytes(public + b"\n")


def load_keys(directory: Path) -> NodeKeys:
    """Read a node's pair and its allow-list.

    Raises:
        KeyFileError: a file is missing or holds no key, or others can read the secret.
    """
    path = directory / "node.secret"
    try:
        with path.open("rb") as file:
            found, secret = os.fstat(file.fileno()), file.read(1 << 10).strip()
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror}; make keys with `headrace keys`") from error
    if found.st_uid not in (os.geteuid(), 0):
        raise KeyFileError(
            f"{path} belongs to user {found.st_uid}, who can read it; make your own with `headrace keys`"
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise KeyFileError(
            f"{path} has mode {mode:04o}: others can read it; run chmod 600 on it, or better make new keys"
        )
    _check(secret, path)
    files = sorted((directory / "allowed").glob("*.public"))
    names = tuple((file.stem, _check(file.read_bytes().strip(), file)) for file in files)
    return NodeKeys(curve_public(secret), secret, frozenset(key for _, key in names), names)


def _check(key: bytes, path: Path) -> bytes:
    if not _Z85.fullmatch(key):
        raise KeyFileError(
            f"{path}: expected a key, 40 characters of Z85 as headrace keys prints them, got {key!r:.60}"
        )
    return key


class ZapAllowList:
    """The allow-list answers libzmq's question, for each CURVE connection of a context, whether the key may come in."""

    def __init__(self, context: Context[Any], keys: NodeKeys, limits: Limits) -> None:
        self._keys = keys
        self.refused = 0
        options = SocketOptions(1024, 4096, limits.drain_max_messages, limits.drain_max_ms, limits.connect_timeout_s)
        self._socket = ZmqSocket(context, Role.LISTENER, options, self._answer)
        self._socket.bind(ZAP_ENDPOINT)

    def _answer(self, frames: list[Frame]) -> None:
        # routing id, empty, version, request id, domain, address, identity, mechanism, credentials
        if len(frames) < 8:
            return
        key = self._z85(bytes(frames[8])) if len(frames) == 9 and bytes(frames[7]) == b"CURVE" else b""
        allowed = self._keys.allows(key)
        if not allowed:
            self._log(bytes(frames[5]), key)
        status, text = (b"200", b"OK") if allowed else (b"400", b"this key is not on the allow-list")
        user = key if allowed else b""
        self._socket.try_send([frames[0], b"", b"1.0", frames[3], status, text, user, b""])

    def _log(self, address: bytes, key: bytes) -> None:
        self.refused += 1
        if worth_a_line(self.refused):
            log.warning("a key that is not allowed is refused", address=address.decode("ascii", "replace"),
                        key=key.decode("ascii", "replace"), times=self.refused)  # fmt: skip

    @staticmethod
    def _z85(raw: bytes) -> bytes:
        return z85_encode(raw) if len(raw) == 32 else b""

    def close(self) -> None:
        self._socket.close(linger_s=0)
