"""The end of a file of lines that somebody still writes, without reading what comes before it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Final

_BLOCK_BYTES: Final = 64 << 10


def whole_lines(path: Path, count: int, max_bytes: int) -> list[str]:
    """The last ``count`` lines that are written to their end, undecodable bytes replaced; none if there is no file.

    No more than ``max_bytes`` are read: then there are fewer lines.
    """
    try:
        with path.open("rb") as file:
            end, whole = _end_with(file, count + 1, max_bytes)
    except FileNotFoundError:
        return []
    # not splitlines: it also parts text at separators that JSON leaves as they are
    ended = end.split(b"\n")[:-1] if whole else end.split(b"\n")[1:-1]
    return [line.decode(errors="replace") for line in ended[-count:]] if count > 0 else []


def _end_with(file: BinaryIO, newlines: int, max_bytes: int) -> tuple[bytes, bool]:
    """From so many newlines before the end of the file, or more, or all of it; and whether it begins with a line."""
    at, blocks, seen = file.seek(0, os.SEEK_END), list[bytes](), 0
    least = max(0, at - max_bytes)
    while at > least and seen < newlines:
        size = min(_BLOCK_BYTES, at - least)
        at = file.seek(at - size)
        block = file.read(size)
        blocks.append(block)
        seen += block.count(b"\n")
    return b"".join(reversed(blocks)), at == 0
