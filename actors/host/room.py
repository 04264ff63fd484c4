"""Room on a disk or in shared memory: checked before it is needed, and explained in a sentence when there is none.

    before     require_room(path, bytes, what)    the file system has fewer free ─▶ NoSpaceLeft
    after      no_space(error, path, what)        any library's error that means a full disk, as NoSpaceLeft
               without_room(path, what)           the sentence alone, for an error of the caller's

Another attempt would only meet the full disk again, so the error is permanent: the run ends where it stands, and goes
on once somebody has made room.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

from transport.errors import HeadraceError

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_WORDS: Final = ("no space left", "disk is full", "quota exceeded", "os error 28")
"""Phrases of libraries (SQLite, safetensors, torch) that report a full disk in text alone."""


class NoSpaceLeft(HeadraceError):
    """A disk or shared memory has no room for what must be written there; the message says where, and how much.

    Infrastructure: to be retried when somebody has made room, by ``headrace run --resume``.
    """

    permanent = True


def free_bytes(path: Path) -> int:
    """Free bytes of the file system of ``path``, or of the nearest directory above that exists."""
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def require_room(path: Path, needed_bytes: int, what: str) -> None:
    """Check that ``path`` has room for ``needed_bytes`` of ``what``.

    Raises:
        NoSpaceLeft: there is too little.
    """
    try:
        free = free_bytes(path)
    except OSError:
        return  # the file system does not tell: writing will show
    if free < needed_bytes:
        raise NoSpaceLeft(_sentence(path, what, free, needed_bytes))


def require_size(path: Path, needed_bytes: int, what: str) -> None:
    """Check that the file system of ``path``, if it were empty, could hold ``needed_bytes`` of ``what``.

    Raises:
        NoSpaceLeft: the file system is too small.
    """
    found = os.statvfs(path.parent)
    size = found.f_blocks * found.f_frsize
    if size < needed_bytes:
        whole = f"{what} needs {_size(needed_bytes)} at {path.parent}, which has {_size(size)} in all"
        raise NoSpaceLeft(f"{whole}: give the machine more (in a container, --shm-size)")


def is_short(path: Path) -> bool:
    """Whether the file system of ``path`` has less than ``limits.disk_reserve_bytes`` free."""
    from configs.limits import DEFAULT_LIMITS  # with pydantic, which a command's help does not need

    try:
        return free_bytes(path) < DEFAULT_LIMITS.disk_reserve_bytes
    except OSError:
        return False


def no_space(error: BaseException, path: Path, what: str, needed_bytes: int = 0) -> NoSpaceLeft | None:
    """NoSpaceLeft if ``error``, or an error that caused it, means a full disk at ``path``; None for any other error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, NoSpaceLeft):
            return cause
        if getattr(cause, "errno", None) in _FULL or any(word in str(cause).lower() for word in _WORDS):
            return NoSpaceLeft(without_room(path, what, needed_bytes))
        cause = cause.__cause__ or cause.__context__
    return None


def without_room(path: Path, what: str, needed_bytes: int = 0) -> str:
    """The sentence that says that ``what`` found no room at ``path``, how much is free there, and what to do."""
    try:
        free = free_bytes(path)
    except OSError:
        free = 0
    return _sentence(path, what, free, needed_bytes)


def _sentence(path: Path, what: str, free: int, needed_bytes: int) -> str:
    needs = f" needs {_size(needed_bytes)}" if needed_bytes else " found no room"
    return f"{what}{needs} at {path}, where {_size(free)} are free: make room there"


def _size(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
