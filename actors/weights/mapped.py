"""The server's mappings: each version that is asked for once, its pages in reach before anybody asks where they can be.

    trainer   prepare ─▶ <…>-spare ── write, rename ──▶ <segment>        the same pages under another name
                             │                              │
    server        coming ─ enter ─▶ kept ──────────── adopt ┴─▶ of       nothing is left to be entered

To enter 600 MB of shared memory into a process's table takes 40 ms of a core, as much as a tenth of a pull. What is
mapped here keeps its pages until it is let go of, also of a file that is gone.
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
    """Maps a segment, or the spare that is to be one. ``entered``: all of its pages are in this process's table."""

    view: memoryview
    inode: int
    entered: bool = False


class MappedVersions:
    """Maps one job's versions, on the loop. Letting a large one go takes long, so last references are handed out."""

    def __init__(self) -> None:
        self._versions: dict[int, Mapped] = {}
        self._coming: Mapped | None = None
        self._unused: list[Mapped] = []

    def of(self, version: int, segment: Path) -> Mapped:
        """``version``, which lies at ``segment``.

        Raises:
            OSError, ValueError: it is not there any more, or is empty.
        """
        if version not in self._versions:
            self._versions[version] = _mapped(segment)
        return self._versions[version]

    def adopt(self, version: int, inode: int) -> None:
        """``version`` is in the file ``inode``, maybe in the pages kept for it; they are kept for no other."""
        coming, self._coming = self._coming, None
        if coming is not None and coming.inode == inode:  # as long as we map it, nobody else has it
            self._versions[version] = coming
        elif coming is not None:
            self._unused.append(coming)

    def coming(self, newest: Path) -> Mapped | None:
        """What the version after the one at ``newest`` will be written to, to be entered now; None: not known."""
        if self._coming is not None or (spare := publishers_spare(newest)) is None:
            return None
        try:
            self._coming = _mapped(spare)
        except (OSError, ValueError):  # it has just been taken
            return None
        return self._coming

    def let_go(self, held: Container[int]) -> list[Mapped]:
        """Those that nobody needs now: of versions that are not ``held``, of what became none."""
        gone, self._unused = self._unused, []
        return gone + [self._versions.pop(version) for version in list(self._versions) if version not in held]


def _mapped(path: Path) -> Mapped:
    """What is in ``path``, and which file that is: it may be given another's name meanwhile."""
    with open_ours(path, "rb") as file:
        return Mapped(map_file(file), os.fstat(file.fileno()).st_ino)
