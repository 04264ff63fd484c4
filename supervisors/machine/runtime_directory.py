"""The directory of a machine process's sockets: private, with a short path, and removed when the process has ended.

    start ─▶ sweep: remove what killed processes have left ─▶ a fresh one, with a marker that names its process
    stop  ─▶ removed        killed ─▶ the next start or stop of a process of the same user removes it

Invariants
- A directory is removed only if it bears our name and our marker, only this user can enter it, and the process that it
  names is gone: a process that has got the same pid by now began at another time.
- Whatever cannot be read or removed stays: a start does not fail for it.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

import msgspec
import psutil

_PREFIX: Final = "headrace-"
_MARKER: Final = "owner.json"
_MARKER_BYTES_MAX: Final = 1024
_SAME_START_S: Final = 2.0
"""Largest difference between two readings of one process's start: the boot time is rounded."""


class Owner(msgspec.Struct, frozen=True):
    """The process that a runtime directory belongs to."""

    pid: int
    began_s: float
    """Wall-clock time at which the process began; it tells processes of the same pid apart."""

    @property
    def is_gone(self) -> bool:
        try:
            return abs(psutil.Process(self.pid).create_time() - self.began_s) > _SAME_START_S
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False  # nobody can tell


def make_runtime_directory() -> Path:
    """A fresh directory that only this user can enter (0700), with a path short enough for ipc."""
    parent = Path(tempfile.gettempdir())
    _sweep(parent)
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    owner = Owner(os.getpid(), psutil.Process().create_time())
    (directory / _MARKER).write_bytes(msgspec.json.encode(owner))
    return directory


def remove_runtime_directory(directory: Path) -> None:
    """Remove the directory of this process, and what killed ones have left, such as a run's functions."""
    shutil.rmtree(directory, ignore_errors=True)
    _sweep(directory.parent)


def _sweep(parent: Path) -> None:
    """Remove what killed processes of this user have left."""
    try:
        found = [entry.path for entry in os.scandir(parent) if entry.name.startswith(_PREFIX)]
    except OSError:
        return
    for path in found:
        if _is_left(Path(path)):
            shutil.rmtree(path, ignore_errors=True)


def _is_left(directory: Path) -> bool:
    try:
        about = directory.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
            return False
        descriptor = os.open(directory / _MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as marker:
            if os.fstat(marker.fileno()).st_uid != os.geteuid():
                return False
            owner = msgspec.json.decode(marker.read(_MARKER_BYTES_MAX), type=Owner)
    except (OSError, msgspec.DecodeError):
        return False
    return owner.pid > 0 and owner.is_gone
