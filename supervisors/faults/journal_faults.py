"""A journal that can act as if its disk were full: it raises SQLite's own error, and fills no disk.

The disk itself has room, so the error is never permanent: the scheduler is started again until the fault is healed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path

from actors.ledger import events as ev
from actors.ledger.errors import JournalFailed
from actors.ledger.journal import SqliteJournal
from configs.limits import Limits

_FULL = "database or disk is full"  # SQLITE_FULL, in SQLite's words


class FaultableJournal(SqliteJournal):
    """A journal that fails while its path is in ``full``. The first ``read`` opens it, nothing before."""

    def __init__(self, path: Path, job: str, limits: Limits, full: set[Path]) -> None:
        self._path = path
        self._name = job
        self._given_limits = limits
        self._full = full
        self._opened = False

    def read(self) -> tuple[int, list[ev.Event]]:
        """Read as ``Journal.read`` does. A full disk refuses this too: to open a journal is to write to it.

        Raises:
            JournalFailed: the disk is full for a while; opening the journal again later may succeed.
        """
        if not self._opened:
            if self._path in self._full:
                raise JournalFailed(f"{self._path.name} cannot be opened: {_FULL}")
            super().__init__(self._path, self._name, self._given_limits)
            self._opened = True
        return super().read()

    async def close(self) -> None:
        if self._opened:
            await super().close()

    def _transact(self, items: Iterable[object], sync: bool) -> None:
        if self._path in self._full:
            raise sqlite3.OperationalError(_FULL)
        super()._transact(items, sync)  # pyright: ignore[reportArgumentType]  the base's own items
