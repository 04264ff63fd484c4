"""The pairs that this user's own processes share on one machine, so that TCP on loopback needs no key by hand.

Other users of a machine can reach its loopback: they live there, and are as foreign as those of another machine. So a
listener at ``tcp://127.0.0.1`` that was given no key directory uses the user's own pair, and whoever dials it without
keys does, too. Only the user can read the secret (0600, in a directory 0700), so only the user gets in::

    $XDG_STATE_HOME/headrace/nodes      between head and nodes             default: ~/.local/state/headrace
    $XDG_STATE_HOME/headrace/control    of the control socket: both ends have the same pair, which may do everything

Invariants
- A pair is made once, whole or not at all: two processes that begin at the same time end with the same one.
- What lies there and is another user's, or can be read by others, is refused (``load_keys``).
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
    """Where this user's pair lies, or would lie."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    base = state if state.is_absolute() else Path.home() / ".local" / "state"
    return base / "headrace" / purpose


def directory_or_own(directory: Path | None, endpoint: str, purpose: Purpose) -> Path | None:
    """``directory``, or for TCP on loopback without one the user's own, made if it is not there.

    Raises:
        KeyFileError: it cannot be made; says what to do.
    """
    if directory is not None or not is_loopback_tcp(endpoint):
        return directory
    own = own_keys_directory(purpose)
    if not (own / "node.secret").exists():
        _make(own)
    return own


def own_keys_for(endpoint: str, key_hex: str | None, purpose: Purpose) -> NodeKeys | None:
    """The user's own pair, if whoever listens at ``endpoint`` on this machine has it; None if there is none, or he has
    another.
    """
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
