"""The directory where the ranks of one group meet on one machine, which only their user can enter.

    leader ─▶ makes and locks it ─▶ the others are told its path ─▶ any rank removes it when the group ends
    a later leader of any group ─▶ removes unlocked ones: all of that group was killed

The lock is held by the leader's process, and ends with it, however that process ends.
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
"""Prefix of a directory for the instant before it is locked, so that nobody takes it for left behind."""

_holders: Final[dict[Path, int]] = {}
"""How many groups of this process meet in a directory: those of several bundles may share one."""
_locks: Final[dict[Path, int]] = {}
"""Directories that this process has made, each with the descriptor that locks it."""


def make_meeting_place() -> Path:
    """Make a fresh directory, locked by this process, and remove those left behind."""
    _remove_left_behind()
    made = Path(tempfile.mkdtemp(prefix=_UNLOCKED_PREFIX))
    lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody else knows it
    place = made.rename(made.with_name(_PREFIX + made.name.removeprefix(_UNLOCKED_PREFIX)))
    _locks[place] = lock
    hold_meeting_place(place)
    return place


def hold_meeting_place(place: Path) -> None:
    """Keep the directory for one more group of this process; ``remove_meeting_place`` follows for each."""
    _holders[place] = _holders.get(place, 0) + 1


def remove_meeting_place(place: Path) -> None:
    """Remove the directory, once all groups of this process that meet there have ended. Idempotent."""
    _holders[place] = _holders.get(place, 1) - 1
    if _holders[place] > 0:
        return
    del _holders[place]
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
