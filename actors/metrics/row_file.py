"""metrics.jsonl: a whole row or none, and an error if there is no room for it."""

from __future__ import annotations

import os
from pathlib import Path

from actors.host.bounded_file import append
from actors.host.room import no_space


def end_last_line(path: Path) -> None:
    """Put a newline behind a last line that was cut off, so that it does not spoil the next one."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


class RowFile:
    """It appends rows to ``path``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, line: str) -> None:
        """Raises NoSpaceLeft: its disk is full, and nothing of it was written."""
        try:
            append(self._descriptor, line.encode())
        except OSError as error:
            raise no_space(error, self._path, "the row of a step") or error from error

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
