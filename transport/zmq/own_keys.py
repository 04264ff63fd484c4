"""Keeps the key pairs that this user's processes share on one machine, so that TCP on loopback needs no setup.

Other users of a machine can connect to its loopback, and are as foreign as those of another machine. So a listener
at ``tcp://127.0.0.1`` that was given no key directory uses the user's own pair, and so does a process that dials it
without keys. Only the user can read the secret (0600, in a directory 0700), so only the user gets in::

    $XDG_STATE_HOME/headrace/nodes      between head and nodes             default: ~/.local/state/headrace
    $XDG_STATE_HOME/headrace/control    for the control socket: both ends have the same pair, which allows everything

Invariants
- A pair is made once, whole or not at all: two processes that start at the same time get the same one.
- Files that belong to another user, or that others can read, are refused (``load_keys``).
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Literal

from transport.endpoints import is_loopback_tcp
from transport.zmq.security import KeyFileError, NodeKeys, generate_keys, load_keys, write_keys

Purpose = Literal["nodes", "control"]


def own_keys_directory(purpose: Purpose) -> Path:
    """The directory of this user's pair, which may not exist yet."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    base = state if state.is_absolute() else Path.home() / ".local" / "state"
    return base / "headrace" / purpose


def directory_or_own(directory: Path | None, endpoint: str, purpose: Purpose) -> Path | None:
    """``directory``; if there is none, for TCP on loopback the user's own, which is made if needed.

    Raises:
        KeyFileError: the user's own cannot be made; the message says what to do.
    """
    if directory is not None or not is_loopback_tcp(endpoint):
        return directory
    own = own_keys_directory(purpose)
    if not (own / "node.secret").exists():
        _make(own)
    return own


def own_keys_for(endpoint: str, key_hex: str | None, purpose: Purpose) -> NodeKeys | None:
    """The user's own pair, for a loopback ``endpoint`` whose listener has it; None: there is none, or another key."""
    own = own_keys_directory(purpose)
    if not is_loopback_tcp(endpoint) or not (own / "node.secret").exists():
        return None
    keys = load_keys(own)
    return keys if key_hex in (None, keys.public_hex) else None


def _make(directory: Path) -> None:
    partial = directory.with_name(f".{directory.name}-{secrets.token_hex(8)}")
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_keys(generate_keys(), partial)
        partial.rename(directory)
    except OSError as error:
        if (directory / "node.secret").exists():
            return  # another process was quicker
        raise KeyFileError(
            f"{directory}: keys for loopback cannot be made there: {error.strerror}; name a directory that you may "
            "write with XDG_STATE_HOME, or make keys with `headrace keys` and start with their directory"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
