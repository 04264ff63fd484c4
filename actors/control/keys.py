"""The control socket's own keys: who may give orders, and who may only look.

A control key directory is a separate key directory (``transport/zmq/security.py``) with one more folder::

    node.secret  node.public      the server's pair, or a client's
    allowed/<name>.public         clients that may do everything
    read-only/<name>.public       clients that may look

Invariants
- A key in both folders may only look, and the command that would put it there refuses.
- Whoever can read the server's own secret may do everything: the server's pair also works as an operator's.
- These keys do not let a node join (``supervisors/head/head_keys.py``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from transport.zmq.security import KeyFileError, NodeKeys, allow, generate_keys, load_keys, write_keys

READ_ONLY_USER: Final = "read-only"
"""User name, at the server, of a client that showed a key of the read-only role."""
READ_ONLY_FOLDER: Final = "read-only"
KEY_CHARACTERS: Final = 40
_Z85: Final = re.compile(rb"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True)
class ControlKeys:
    """A control server has its own pair and the public keys of its clients, as Z85."""

    pair: NodeKeys
    read_only: frozenset[bytes] = frozenset()

    def for_allow_list(self) -> NodeKeys:
        """The keys of all who may connect, in either role."""
        return NodeKeys(self.pair.public, self.pair.secret, self.pair.allowed | self.read_only)

    def role_of(self, public: str) -> str:
        """READ_ONLY_USER, or empty for a client that may do everything."""
        return READ_ONLY_USER if public.encode() in self.read_only else ""


def load_control_keys(directory: Path) -> ControlKeys:
    """Read a control key directory.

    Raises:
        KeyFileError: a file is missing or holds no key, or others can read the secret.
    """
    files = sorted((directory / READ_ONLY_FOLDER).glob("*.public"))
    return ControlKeys(load_keys(directory), frozenset(_read(file) for file in files))


def make_client(directory: Path) -> NodeKeys:
    """A client's own pair in ``directory``, generated if there is none.

    Raises:
        KeyFileError: the files there are no pair, or others can read the secret.
    """
    if not (directory / "node.secret").exists():
        write_keys(generate_keys(), directory)
    return load_keys(directory)


def allow_client(directory: Path, name: str, public: bytes) -> None:
    """Let a node or an operating client with this public key connect, from the next load on.

    Raises:
        ValueError: the name cannot be a file name.
        KeyFileError: ``public`` is not a key, or is in the read-only folder; remove it there first.
    """
    for file in (directory / READ_ONLY_FOLDER).glob("*.public"):
        if _read(file) == public:
            raise KeyFileError(f"{name}: this key may only look as long as {file} is there; remove it first")
    allow(directory, name, public)


def client_names(directory: Path) -> tuple[list[str], list[str]]:
    """Names of the clients that may do everything, and of those that may only look."""
    looking = sorted(file.stem for file in (directory / READ_ONLY_FOLDER).glob("*.public"))
    return sorted(file.stem for file in (directory / "allowed").glob("*.public")), looking


def allow_read_only(directory: Path, name: str, public: bytes) -> None:
    """Let a client with this public key look, from the next load on.

    Raises:
        ValueError: the name cannot be a file name.
        KeyFileError: ``public`` is not a key, or is in the folder ``allowed``; remove it there first.
    """
    for other in (directory / "allowed").glob("*.public"):
        if _read(other) == public:
            raise KeyFileError(f"{name}: this key may do everything as long as {other} is there; remove it first")
    if not name or Path(name).name != name:
        raise ValueError(f"client name {name!r}: expected a plain file name")
    folder = directory / READ_ONLY_FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    file = folder / f"{name}.public"
    _check(public, file)
    file.write_bytes(public + b"\n")


def _read(file: Path) -> bytes:
    return _check(file.read_bytes().strip(), file)


def _check(key: bytes, file: Path) -> bytes:
    if _Z85.fullmatch(key) is None:
        raise KeyFileError(
            f"{file}: expected a key, {KEY_CHARACTERS} characters of Z85 as headrace keys prints them, got {key!r:.60}"
        )
    return key
