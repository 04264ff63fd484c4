"""A process's last words: the typed error that it ends by, through a pipe that its parent made.

    launch: pipe ─▶ child inherits the write end ─▶ leave(reason) ─▶ exit ─▶ parent: read_note(read end)

Invariants
- A pipe needs no disk, no link and no event loop: the note arrives from a process whose disk is full, whose head is
  gone, or which never got as far as its transport.
- Neither end ever blocks: the note fits the smallest pipe there is, and the parent reads what is there.
- Processes that the child starts do not inherit the pipe.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

import msgspec

from actors.core.reason import Reason

VARIABLE: Final = "HEADRACE_EXIT_NOTE"
"""Environment variable with the number of the child's end of the pipe."""
_NOTE_BYTES: Final = 4096
"""Size of the smallest pipe that Linux gives; a write of at most this is whole or not at all."""

_decoder = msgspec.json.Decoder(Reason)


def make_pipe() -> tuple[int, int]:
    """(read end, write end), both closed on exec.

    Raises:
        OSError: too many files are open.
    """
    ours, childs = os.pipe()
    os.set_blocking(ours, False)
    return ours, childs


def take_pipe() -> int | None:
    """The child's end, once, at the start of the child; None if its parent made no pipe."""
    number = os.environ.pop(VARIABLE, "")
    if not number.isdecimal():
        return None
    try:
        os.set_inheritable(int(number), False)
        os.set_blocking(int(number), False)
    except OSError:
        return None
    return int(number)


def leave(pipe: int | None, reason: Reason) -> None:
    """Say why the process ends. An error here is ignored: the parent sees the exit code anyway."""
    if pipe is None:
        return
    note = msgspec.json.encode(reason)
    if len(note) > _NOTE_BYTES:  # its characters take several bytes each
        note = msgspec.json.encode(msgspec.structs.replace(reason, message=reason.message[: _NOTE_BYTES // 8]))
    with contextlib.suppress(OSError):
        os.write(pipe, note)


def read_note(pipe: int) -> Reason | None:
    """The reason that a child has left at its end; closes the pipe."""
    try:
        return _decoder.decode(os.read(pipe, _NOTE_BYTES))
    except (OSError, msgspec.DecodeError):
        return None
    finally:
        os.close(pipe)
