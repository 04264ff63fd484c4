"""One machine's share of a version: a file as long as the whole version, with holes where others have the bytes.

    each rank of the machine   write ─▶ <segment>@<share>.partial ─┐
    the first of them          seal  ◀── hashes of its chunks ─────┴─▶ <segment>@<share>     whole under its final name

All bytes lie where they lie in the whole version, so a share is served as a segment is. The weight server's machine has
its share at the segment's own path. Holes take no memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import xxhash

from actors.weights.memory import map_segment, partial_path
from actors.weights.segments import held_path, open_ours
from configs.names import rank_name


def share_name(rank: int) -> str:
    """Name of the share beside that rank of the trainer: as a source, as an actor, and for the scheduler."""
    return rank_name("weights", rank)


def share_path(segment: Path, source: str) -> Path:
    """Path on this machine of the share that ``source`` has of the version whose segment is at ``segment``.

    Raises:
        OSError: see ``held_path``.
    """
    return held_path(segment, source) if source else segment


def write_pieces(path: Path, total_bytes: int, pieces: Iterable[tuple[int, memoryview]]) -> None:
    """Write ``pieces``, each (offset, uint8), into the unfinished share at ``path``; several processes may at once.

    Raises:
        OSError: there is no room, or the file is not ours.
    """
    partial = partial_path(path)
    open_ours(partial, "ab").close()  # made if it is not there; "r+b" does not make it
    with open_ours(partial, "r+b") as file:
        os.ftruncate(file.fileno(), total_bytes)
        for offset, data in pieces:
            done = 0
            while done < len(data):
                done += os.pwrite(file.fileno(), data[done:], offset + done)


def seal(path: Path, bounds: Iterable[tuple[int, int]]) -> tuple[bytes, ...]:
    """Give the share at ``path``, which all have written, its final name; returns the hashes of its chunks ``bounds``.

    Raises:
        OSError: nobody has written it.
    """
    with contextlib.suppress(FileNotFoundError):  # it has its name already
        partial_path(path).rename(path)
    view = map_segment(path)
    return tuple(xxhash.xxh3_128_digest(view[start:end]) for start, end in bounds)
