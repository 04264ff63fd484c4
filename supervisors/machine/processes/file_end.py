"""Reads the last lines of a file that is still being written, without reading what comes before them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Final

from actors.host.plain_file import open_plain

_BLOCK_BYTES: Final = 64 << 10


def whole_lines(path: Path, count: int, max_bytes: int) -> list[str]:
    """The last ``count`` complete lines, undecodable bytes replaced; none if there is no file.

    At most ``max_bytes`` are read, so there are fewer if they are long.

    Raises:
        ConfigError: ``path`` is no plain file.
    """
    try:
        with open_plain(path) as file:
            end, whole = _end_with(file, count + 1, max_bytes)
    except FileNotFoundError:
        return []
    # not splitlines, which also splits at separators that JSON leaves as they are
    ended = end.split(b"\n")[:-1] if whole else end.split(b"\n")[1:-1]
    return [line.decode(errors="replace") for line in ended[-count:]] if count > 0 else []


def _end_with(file: BinaryIO, newlines: int, max_bytes: int) -> tuple[bytes, bool]:
    """The end of the file with at least ``newlines`` newlines, or as much as may be read; and whether that is all."""
    at, blocks, seen = file.seek(0, os.SEEK_END), list[bytes](), 0
    least = max(0, at - max_bytes)
    while at > least and seen < newlines:
        size = min(_BLOCK_BYTES, at - least)
        at = file.seek(at - size)
        block = file.read(size)
        blocks.append(block)
        seen += block.count(b"\n")
    return b"".join(reversed(blocks)), at == 0
