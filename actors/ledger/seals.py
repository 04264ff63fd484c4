"""How a journal's events are known to be the ones that were written.

    row     hash = xxh3-128 of (seq, kind, job, step, body)                  an altered event is found, and named
    meta    seal = all hashes added up (xor), noted in each transaction      a missing or added event is found
            durable_seq = the newest event that was synced to the disk       a missing tail is found
            samples_seal = the same sum of the rows of ``samples``           an altered, missing or added one is found

This guards against disks, copies and editors, not against somebody who computes the sums anew. A journal that was begun
without hashes has them from its first new event on; only those events are checked.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import xxhash

from actors.ledger.errors import JournalDamaged

REMEDY: Final = "headrace doctor --run names the checkpoint to go back to"


class EventRow(NamedTuple):
    """Holds a row of the table ``events``; ``hash`` is empty in one of a journal of 0.1."""

    seq: int
    kind: str
    job: str
    step: int
    body: bytes
    hash: bytes


def sealed(seq: int, kind: str, job: str, step: int, body: bytes) -> EventRow:
    """The row of an event, with its hash."""
    return EventRow(seq, kind, job, step, body, _hash(seq, kind, job, step, body))


def _hash(seq: int, kind: str, job: str, step: int, body: bytes) -> bytes:
    digest = xxhash.xxh3_128(f"{seq}\n{kind}\n{job}\n{step}\n".encode())
    digest.update(body)
    return digest.digest()


def is_intact(row: EventRow) -> bool:
    """Whether an event is as it was written; one without a hash is taken to be."""
    return isinstance(row.body, bytes) and row.hash in (b"", _hash(*row[:5]))


def total(hashes: Iterable[tuple[bytes | None]]) -> int:
    """The sum of a column of hashes; rows without one add nothing."""
    seal = 0
    for (value,) in hashes:
        seal ^= int.from_bytes(value or b"")
    return seal


def store(db: sqlite3.Connection, seal: int) -> None:
    db.execute("INSERT OR REPLACE INTO meta VALUES ('seal', ?)", (f"{seal:032x}",))


def stored(db: sqlite3.Connection) -> int:
    """The sum as it was noted; 0 in a journal that has none yet."""
    found = db.execute("SELECT value FROM meta WHERE name = 'seal'").fetchone()
    return int(found[0], 16) if found else 0


def sample_hash(row: tuple[object, ...]) -> int:
    """The hash of a row of the table ``samples``."""
    return int.from_bytes(xxhash.xxh3_128_digest(msgspec.msgpack.encode(row)))


def samples_total(db: sqlite3.Connection) -> int:
    """The sum of the table ``samples`` as it is now."""
    seal = 0
    for row in db.execute("SELECT * FROM samples"):
        seal ^= sample_hash(row)
    return seal


def store_samples(db: sqlite3.Connection, seal: int) -> None:
    db.execute("INSERT OR REPLACE INTO meta VALUES ('samples_seal', ?)", (f"{seal:032x}",))


def stored_samples(db: sqlite3.Connection) -> int | None:
    """The sum of the table ``samples`` as it was noted; None in a journal that was begun without."""
    found = db.execute("SELECT value FROM meta WHERE name = 'samples_seal'").fetchone()
    return int(found[0], 16) if found else None


def durable_seq(db: sqlite3.Connection) -> int:
    found = db.execute("SELECT value FROM meta WHERE name = 'durable_seq'").fetchone()
    return int(found[0]) if found else 0


def rows_of(db: sqlite3.Connection) -> list[EventRow]:
    """Every event, in order."""
    names = [str(column[1]) for column in db.execute("PRAGMA table_info(events)")]
    column = "coalesce(hash, x'')" if "hash" in names else "x''"
    query = f"SELECT seq, kind, job, step, body, {column} FROM events ORDER BY seq"  # noqa: S608
    return [EventRow(*row) for row in db.execute(query)]


def checked(db: sqlite3.Connection, path: Path) -> list[EventRow]:
    """Every event, in order, as it was written; a torn tail that was never durable is left out.

    Raises:
        JournalDamaged: an event was altered, or some are missing.
    """
    try:
        rows, seal, durable = rows_of(db), stored(db), durable_seq(db)
        samples_seal = stored_samples(db)
        samples_whole = samples_seal is None or samples_seal == samples_total(db)
    except (sqlite3.DatabaseError, ValueError, TypeError) as error:
        raise JournalDamaged(f"{path} is damaged: {error}; {REMEDY}") from error
    hashed = False
    for at, row in enumerate(rows):
        hashed = hashed or bool(row.hash)
        if isinstance(row.body, bytes) and row.hash == (_hash(*row[:5]) if hashed else b""):
            continue
        if row.seq > durable:
            return rows[:at]
        raise JournalDamaged(f"{path}: event {row.seq} ({row.kind}) was altered: its hash differs; {REMEDY}")
    newest = rows[-1].seq if rows else 0
    if newest < durable:
        raise JournalDamaged(
            f"{path}: the events after {newest} are missing: {durable} was the newest that is durable; {REMEDY}"
        )
    if total((row.hash,) for row in rows) != seal:
        raise JournalDamaged(f"{path}: events are missing, or were added: their sum differs; {REMEDY}")
    if not samples_whole:
        raise JournalDamaged(
            f"{path}: rows of the table samples were altered, removed or added: their sum differs; {REMEDY}"
        )
    return rows
