"""Files that grow while they are read: each look gives the lines that have been added since the one before.

Invariants
- Only whole lines are given, each once; a line that is being written comes with the next look.
- A file that was replaced, or has become shorter, begins anew, and the reader is told.
- Of a file that is longer than ``newest_bytes`` only its end is read; the first line of it that may be cut is left out.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast


class Look(NamedTuple):
    """A look is what has come since the look before."""

    anew: bool
    """Whether all that was given before is void: the file is another one."""
    items: list[dict[str, Any]]


class _Tail:
    def __init__(self, path: Path, newest_bytes: int) -> None:
        self._path = path
        self._newest_bytes = newest_bytes
        self._inode = 0
        self._at = 0

    def _open_at(self) -> tuple[bool, bytes, bytes]:
        """Whether the file is another one, what is passed over of it, and what is to be read."""
        try:
            file = self._path.open("rb")
        except OSError:
            return False, b"", b""
        with file:
            status = os.fstat(file.fileno())
            anew = status.st_ino != self._inode or status.st_size < self._at
            passed = b""
            if anew:
                self._inode, self._at = status.st_ino, 0
                passed = self._pass_over(file, status.st_size)
            file.seek(self._at)
            return anew, passed, file.read(max(0, status.st_size - self._at))

    def _pass_over(self, file: BinaryIO, size: int) -> bytes:
        """Begin at the first whole line of the newest part."""
        if size <= self._newest_bytes:
            return b""
        file.seek(size - self._newest_bytes)
        begin = size - self._newest_bytes
        self._at = begin + file.read(self._newest_bytes).find(b"\n") + 1
        return b""


class JsonLines(_Tail):
    """Reads a file with one JSON object a line. Lines that are none are passed over."""

    def look(self) -> Look:
        anew, _, body = self._open_at()
        whole = body[: body.rfind(b"\n") + 1]
        self._at += len(whole)
        return Look(anew, [item for line in whole.split(b"\n") if (item := _object(line)) is not None])


class TraceEvents(_Tail):
    """Reads ``trace.json`` (``actors/metrics/trace.py``): an event a line, behind the last of which the array ends.

    That end is overwritten by the next event, so it is never taken as read. Names of tracks are found in the part that
    is passed over, too: they stand where a track began.
    """

    def look(self) -> Look:
        anew, passed, body = self._open_at()
        named = [item for line in passed.split(b"\n") if b'"thread_name"' in line and (item := _event(line))]
        items: list[dict[str, Any]] = []
        place = taken = 0
        while (end := body.find(b"\n", place)) >= 0:
            line = body[place:end]
            if line.strip() == b"]":
                break
            if (item := _event(line)) is not None:
                items.append(item)
                taken = place + len(line.rstrip(b", \r"))
            place = end + 1
        self._at += taken
        return Look(anew, named + items)

    def _pass_over(self, file: BinaryIO, size: int) -> bytes:
        super()._pass_over(file, size)
        file.seek(0)
        return b"\n".join(line for line in file.read(self._at).split(b"\n") if b'"thread_name"' in line)


def _event(line: bytes) -> dict[str, Any] | None:
    return _object(line.strip().strip(b","))


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        item: object = json.loads(line) if line.strip() else None
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", item) if isinstance(item, dict) else None
