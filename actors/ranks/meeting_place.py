"""The directory where the ranks of one life meet on one machine, which only their user can enter.

    leader ─▶ made and locked ─▶ the others find it by its path ─▶ removed at the life's end, by any of them
    a later leader of any group ─▶ removes what nobody holds: all of that group was killed

The lock is the leader's, and ends with its process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

_PREFIX: Final = "headrace-ranks-"
_UNLOCKED_PREFIX: Final = "headrace-meeting-"
"""Prefix of a directory that is not locked yet, for an instant: nobody takes it for left behind."""

_locks: Final[dict[Path, int]] = {}
"""Directories that this process has made, each with the descriptor that locks it."""


def make_meeting_place() -> Path:
    """A fresh one, locked by this process."""
    _remove_left_behind()
    made = Path(tempfile.mkdtemp(prefix=_UNLOCKED_PREFIX))
    lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody else knows it
    place = made.rename(made.with_name(_PREFIX + made.name.removeprefix(_UNLOCKED_PREFIX)))
    _locks[place] = lock
    return place


def remove_meeting_place(place: Path) -> None:
    """Once the life is over. Idempotent."""
    shutil.rmtree(place, ignore_errors=True)
    if (lock := _locks.pop(place, None)) is not None:
        os.close(lock)


def _remove_left_behind() -> None:
    for place in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, locked, or gone meanwhile
            lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(place, ignore_errors=True)
            finally:
                os.close(lock)
