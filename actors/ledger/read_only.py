"""Opens a journal to read it: one that a run writes meanwhile, or one of which nobody knows who made it.

SQLite follows links, runs views, and walks pages that refer to each other for ever. So:

- the file and those beside it are plain files (``plain_file.py``), and all that it holds are tables and their indexes;
- a query may take as many steps of SQLite's machine as the file's size explains, and then it is interrupted.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

from actors.host.plain_file import require_plain
from actors.ledger.errors import JournalUnreadable

_OPERATIONS_A_BYTE: Final = 2
"""A row has some 60 bytes, and is read and sorted in less than 60 steps."""
_OPERATIONS_LEAST: Final = 20_000_000
_ASKED_EVERY: Final = 1_000_000


@contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """The journal at ``path`` in one transaction, which changes nothing.

    Raises:
        ConfigError: it is no plain file.
        JournalUnreadable: it holds what no journal does.
        sqlite3.DatabaseError: it is damaged, or a query takes longer than its size explains.
    """
    files = [path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")]
    for file in files:
        require_plain(file)
    size = sum(file.stat().st_size for file in files if file.exists())
    left = (_OPERATIONS_LEAST + _OPERATIONS_A_BYTE * size) // _ASKED_EVERY

    def interrupted() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as db:
        db.set_progress_handler(interrupted, _ASKED_EVERY)
        db.execute("PRAGMA trusted_schema=OFF")
        db.execute("BEGIN")
        odd = db.execute(
            "SELECT type, name FROM sqlite_schema WHERE type NOT IN ('table', 'index') OR rootpage = 0 LIMIT 1"
        ).fetchone()
        if odd is not None:
            raise JournalUnreadable(f"{path} is no journal: it holds a {odd[0]} {odd[1]!r}, expected tables alone")
        yield db
