"""A child's stdout and stderr in a file of bounded size.

The child writes straight to the file (append mode), so its last words are there whatever happens to us, and it never
blocks on a pipe that nobody drains. The owner of the process calls ``trim`` of ``actors/host/bounded_file.py`` now and
then.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_TAIL_BYTES: Final = 32 << 10


def open_log(path: Path) -> int:
    """A file descriptor for appending; makes the directory. The caller closes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def last_lines(path: Path, count: int) -> tuple[str, ...]:
    """The last ``count`` lines, undecodable bytes replaced; empty when there is no file."""
    try:
        with path.open("rb") as source:
            source.seek(0, os.SEEK_END)
            source.seek(max(0, source.tell() - _TAIL_BYTES))
            text = source.read(_TAIL_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return ()
    return tuple(text.splitlines()[-count:])
