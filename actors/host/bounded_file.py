"""Files that only grow are kept within a size here, and writing to them never fails.

    trim          another process writes (append mode): the newest half moves to ``<name>.1``, the file starts anew
    BoundedFile   this process writes: at half the size the file becomes ``<name>.1``, and another one is begun

Text for which the disk has no room is left out: no log is worth a run. A line is written whole or not at all.
"""

from __future__ import annotations

import os
from pathlib import Path


def former(path: Path) -> Path:
    """Path of the part of the file before the present one."""
    return path.with_name(f"{path.name}.1")


def trim(path: Path, max_bytes: int) -> bool:
    """Keep the newest half of ``max_bytes`` in ``<path>.1`` when the file has outgrown it; True when it had.

    Lines written during the move may be lost; the process that writes is not disturbed.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return False
    if size <= max_bytes:
        return False
    try:
        with path.open("rb") as source:
            source.seek(size - max_bytes // 2)
            former(path).write_bytes(source.read(max_bytes))
    except OSError:  # the disk is full, so the room of the file itself is needed all the more
        former(path).unlink(missing_ok=True)
    os.truncate(path, 0)
    return True


class BoundedFile:
    """Appends text to ``path``; the file and its former part have at most ``max_bytes``."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Raises OSError: ``path`` cannot be opened."""
        self._path = path
        self._max_bytes = max_bytes
        self.lost = 0
        """Number of writes that found no room."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open()

    def _open(self) -> None:
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._descriptor).st_size

    def write(self, text: str) -> None:
        """Write all of ``text`` or nothing."""
        data = text.encode("utf-8", "replace")
        if self._size and self._size + len(data) > self._max_bytes // 2:
            self._begin_anew()
        try:
            append(self._descriptor, data)
        except OSError:
            self.lost += 1
            return
        self._size += len(data)

    def _begin_anew(self) -> None:
        full = self._descriptor
        try:
            self._path.replace(former(self._path))
            self._open()
        except OSError:
            return  # the file or its directory is gone: go on with the open descriptor
        os.close(full)

    def flush(self) -> None:
        """Do nothing: no text is buffered."""

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def append(descriptor: int, data: bytes) -> None:
    """Append ``data``, or leave the file as it was.

    Raises:
        OSError: ``data`` could not be written.
    """
    written = 0
    try:
        while written < len(data):
            written += os.write(descriptor, data[written:])
    except OSError:
        if written:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
        raise
