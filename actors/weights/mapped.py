"""The server's mappings: one for each requested version, if possible with its pages entered before the request.

    trainer   prepare ─▶ <…>-spare ── write, rename ──▶ <segment>        the same pages under another name
                             │                              │
    server        coming ─ enter ─▶ kept ──────────── adopt ┴─▶ of       nothing is left to be entered

Entering 600 MB of shared memory into a process's page table takes 40 ms of a core, as much as a tenth of a pull. A
mapping keeps its pages until it is released, even if its file is gone.
"""

from __future__ import annotations

import os
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from actors.weights.memory import map_file, publishers_spare
from actors.weights.segments import open_ours


@dataclass(eq=False, slots=True)
class Mapped:
    """Maps a segment, or a spare that will be one. ``entered``: all of its pages are in this process's page table."""

    view: memoryview
    inode: int
    entered: bool = False


class MappedVersions:
    """Maps one job's versions, on the loop. Unmapping a large one takes long, so callers get the last references."""

    def __init__(self) -> None:
        self._versions: dict[int, Mapped] = {}
        self._coming: Mapped | None = None
        self._unused: list[Mapped] = []

    def of(self, version: int, segment: Path) -> Mapped:
        """The mapping of ``version``, which lies at ``segment``.

        Raises:
            OSError, ValueError: the file is gone, or is empty.
        """
        if version not in self._versions:
            self._versions[version] = _mapped(segment)
        return self._versions[version]

    def adopt(self, version: int, inode: int) -> None:
        """Note that ``version`` is in the file ``inode``; if that is the mapped spare, its mapping is kept for it."""
        coming, self._coming = self._coming, None
        if coming is not None and coming.inode == inode:  # while we map it, no other file gets its inode
            self._versions[version] = coming
        elif coming is not None:
            self._unused.append(coming)

    def coming(self, newest: Path) -> Mapped | None:
        """The spare to which the version after ``newest`` will be written, to be entered now; None: not known."""
        if self._coming is not None or (spare := publishers_spare(newest)) is None:
            return None
        try:
            self._coming = _mapped(spare)
        except (OSError, ValueError):  # the spare has just been taken
            return None
        return self._coming

    def let_go(self, held: Container[int]) -> list[Mapped]:
        """Remove and return unneeded mappings: of versions that are not ``held``, and of spares that became none."""
        gone, self._unused = self._unused, []
        return gone + [self._versions.pop(version) for version in list(self._versions) if version not in held]


def _mapped(path: Path) -> Mapped:
    """Map ``path``, and note the file's inode, since the file may be renamed meanwhile."""
    with open_ours(path, "rb") as file:
        return Mapped(map_file(file), os.fstat(file.fileno()).st_ino)
