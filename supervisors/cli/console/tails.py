"""Files that grow while they are read: each look gives the lines that have been added since the one before.

Invariants
- Only whole lines are given, each once; a line that is being written comes with the next look.
- A file that was replaced, or has become shorter, begins anew, and the reader is told.
- Of a file that is longer than ``newest_bytes`` only its end is read, without the first line, which may be cut.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from actors.host.plain_file import json_object, open_plain
from configs.errors import ConfigError


class Look(NamedTuple):
    """What a file has gained since the look before."""

    anew: bool
    """Whether the file is another one, so that all items given before are void."""
    items: list[dict[str, Any]]


class _Tail:
    def __init__(self, path: Path, newest_bytes: int) -> None:
        self._path = path
        self._newest_bytes = newest_bytes
        self._inode = 0
        self._at = 0

    def _open_at(self) -> tuple[bool, bytes, bytes]:
        """Whether the file is another one, the part of it that is skipped but matters, and the bytes to read."""
        try:
            file = open_plain(self._path)
        except (OSError, ConfigError):
            return False, b"", b""
        with file:
            status = os.fstat(file.fileno())
            anew = status.st_ino != self._inode or status.st_size < self._at
            passed = b""
            if anew:
                self._inode, self._at = status.st_ino, 0
                passed = self._pass_over(file, status.st_size)
            file.seek(self._at)
            return anew, passed, file.read(min(self._newest_bytes, max(0, status.st_size - self._at)))

    def _pass_over(self, file: BinaryIO, size: int) -> bytes:
        """Begin at the first whole line of the newest part; returns the skipped lines that matter: here none."""
        if size <= self._newest_bytes:
            return b""
        file.seek(size - self._newest_bytes)
        begin = size - self._newest_bytes
        self._at = begin + file.read(self._newest_bytes).find(b"\n") + 1
        return b""


class JsonLines(_Tail):
    """Reads a file with one JSON object a line. Other lines are skipped."""

    def look(self) -> Look:
        anew, _, body = self._open_at()
        whole = body[: body.rfind(b"\n") + 1]
        self._at += len(whole)
        return Look(anew, [item for line in whole.split(b"\n") if (item := json_object(line)) is not None])


class TraceEvents(_Tail):
    """Reads ``trace.json`` (``actors/metrics/trace.py``): an event a line, and then the end of the array.

    That end is overwritten by the next event, so it is never taken as read. Names of tracks are read from the
    skipped part, too, since they stand where a track began.
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
        skipped = file.read(min(self._at, self._newest_bytes))
        return b"\n".join(line for line in skipped.split(b"\n") if b'"thread_name"' in line)


def _event(line: bytes) -> dict[str, Any] | None:
    return json_object(line.strip().strip(b","))
