"""The journal: the durable list of ledger events, and the committed samples in a table that people can read.

Invariants
- Events are kept in the order in which they were appended, and what is on disk is always a prefix of them. This is a
  write-ahead log with its two steps swapped: the ledger changes first, in memory, and the log follows. Nobody is *told*
  of a change before it is logged, so what a crash takes was never promised.
- ``durable`` returns when everything appended before it would survive a power cut. Other events are group-committed
  within ``journal_flush_s``; a crash may lose the tail, which the run simply produces anew.
- ``append`` never waits and encodes nothing: the writer thread does. The bytes that wait for it are bounded: ``room``
  waits until there is space.
- A failed write is final: every later call raises JournalFailed, since the file no longer follows the ledger. The
  writer writes nothing after a failure, so that there is no hole.
- Reading checks what was written: each event has a hash, and each transaction notes the sum of all hashes, so that an
  event that was altered, removed or added is found (``seals.py``). Events of journals of 0.1 have no hash.

    append ──▶ waiting ──flush timer, durable()──▶ writer thread ──one transaction──▶ journal.db
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from actors.host.room import is_short, no_space, require_room, without_room
from actors.ledger import events as ev
from actors.ledger import seals
from actors.ledger.batch import StepBatch
from actors.ledger.committed import CommittedSample, committed_rows
from actors.ledger.errors import JournalDamaged, JournalFailed, JournalFull, JournalUnreadable
from actors.ledger.read_only import opened
from actors.protocol.evaluations import is_evaluation
from configs.limits import DEFAULT_LIMITS, Limits

SCHEMA_VERSION = 4
_WITHOUT_HASHES = 3
"""Older version, whose events have no hash; opening such a journal upgrades it."""
_PAGE_BYTES = 16384
"""Page size. Token events weigh tens of KiB: pages of 4 KiB would cost twice the CPU per byte."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, job TEXT NOT NULL, step INTEGER NOT NULL, body BLOB NOT NULL,
    hash BLOB);
CREATE TABLE IF NOT EXISTS samples (
    job TEXT NOT NULL, step INTEGER NOT NULL, prompt INTEGER NOT NULL, sibling INTEGER NOT NULL, state TEXT NOT NULL,
    tokens_hash TEXT NOT NULL, n_tokens INTEGER NOT NULL, reward REAL, finish TEXT NOT NULL,
    first_version INTEGER, last_version INTEGER, attempts INTEGER NOT NULL, reason TEXT NOT NULL,
    PRIMARY KEY (job, step, prompt, sibling)) WITHOUT ROWID;
"""
KEPT_KINDS = ("opened", "committed", "checkpointed", "rewound", "paused", "stopping", "window_learned", "evaluated")
"""Kinds of small events that are never pruned: commits, checkpoints, evaluations, windows, and whether to go on."""


class Journal(Protocol):
    """Keeps the events of a ledger: the part of a journal that the scheduler uses."""

    def read(self) -> tuple[int, list[ev.Event]]:
        """The step below which events have been pruned, and all events."""
        ...

    def append(self, event: ev.Event) -> None: ...

    def record(self, batch: StepBatch) -> None:
        """Put the batch's samples into the ``samples`` table, with the step's commit."""
        ...

    async def room(self) -> None: ...

    async def durable(self) -> None:
        """Wait until all that was appended survives a power cut; raises JournalFailed if the disk refuses."""
        ...

    def prune(self, below: int) -> None:
        """Delete the events of steps below ``below``, except ``KEPT_KINDS``."""
        ...

    async def close(self) -> None: ...


def prune_step(event: ev.Event, newest: int) -> int:
    """The step with which an event may be pruned; ``newest`` is the newest issued step.

    A report may hold tokens of several steps: it is pruned with the newest one that it can refer to. An event of an
    evaluation is too, as that runs beside the step.
    """
    of_all = isinstance(event, ev.Opened | ev.TokensAppended | ev.Returned | ev.Suspected | ev.Paused | ev.Stopping)
    return newest if of_all or is_evaluation(event.step) else event.step


@dataclass(frozen=True, slots=True)
class _Prune:
    below: int


class SqliteJournal:
    """Writes ``journal.db`` in SQLite's WAL mode.

    journal = SqliteJournal(run_dir / "journal.db", "a")     # blocks on the disk, as ``read`` does
    floor, events = journal.read()                           # of the run's former lives, or JournalDamaged
    journal.append(event)                                    # in memory; on disk within ``journal_flush_s``
    await journal.room()                                     # at once, unless the disk is far behind
    await journal.durable()                                  # all that was appended survives a power cut: tell people
    await journal.close()
    """

    def __init__(self, path: Path, job: str, limits: Limits = DEFAULT_LIMITS) -> None:
        self._path = path
        self._job = job
        self._limits = limits
        self._waiting: list[ev.Event | StepBatch | _Prune] = []
        self._unwritten_bytes = 0
        self._flushed_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._failure: JournalFailed | None = None
        self._room = asyncio.Event()
        self._room.set()
        self._broken: JournalFailed | None = None
        """Failure of the writer, which writes nothing after it; the loop hears of it a little later."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")
        require_room(path, limits.disk_reserve_bytes, "the journal")
        self._db = _open(path, job)
        try:
            # Of former lives too: what comes before this life's first batch is of the steps that they issued.
            self._seq, self._newest_step = map(int, self._db.execute(_LAST).fetchone())
            self._seal = seals.stored(self._db)
            samples_seal = seals.stored_samples(self._db)
            self._samples_seal = seals.samples_total(self._db) if samples_seal is None else samples_seal
        except (sqlite3.DatabaseError, ValueError, TypeError) as error:
            raise JournalDamaged(f"{path} is damaged: {error}; {seals.REMEDY}") from error

    @staticmethod
    def make(path: Path, job: str) -> None:
        """Make an empty journal."""
        _open(path, job).close()

    def read(self) -> tuple[int, list[ev.Event]]:
        """Raises:
        JournalDamaged: the events are not those that were written.
        """
        rows = seals.checked(self._db, self._path)
        events = _events(self._db, rows)
        newest = rows[len(events) - 1].seq if events else 0
        if newest < self._seq:  # drop the torn tail; the next event takes its number
            self._db.execute("DELETE FROM events WHERE seq > ?", (newest,))
            self._seq, self._newest_step = map(int, self._db.execute(_LAST).fetchone())
            self._seal = seals.total((row.hash,) for row in rows[: len(events)])
            seals.store(self._db, self._seal)
        return _pruned_below(self._db), events

    def append(self, event: ev.Event) -> None:
        self._put(event)

    def record(self, batch: StepBatch) -> None:
        self._put(batch)

    def prune(self, below: int) -> None:
        self._put(_Prune(below))

    async def room(self) -> None:
        """Wait until the writer has caught up."""
        if not self._room.is_set():
            async with asyncio.timeout(self._limits.journal_stall_s):
                await self._room.wait()
        self._check()

    async def durable(self) -> None:
        self._check()
        flushed = asyncio.wrap_future(self._flush(sync=True))
        try:
            async with asyncio.timeout(self._limits.journal_stall_s):
                await asyncio.shield(flushed)  # a cancelled waiter must not cancel the write for others
        except TimeoutError as error:
            self._failure = JournalFailed(f"the disk did not confirm within {self._limits.journal_stall_s} s")
            raise self._failure from error

    async def close(self) -> None:
        try:
            if self._failure is None:
                await self.durable()
        finally:
            self._writer.submit(self._db.close)
            self._writer.shutdown(wait=False)

    # ------------------------------------------------------------ the loop's side

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _put(self, item: ev.Event | StepBatch | _Prune) -> None:
        self._check()
        self._waiting.append(item)
        self._unwritten_bytes += _weight(item)
        if self._unwritten_bytes >= self._limits.journal_queue_bytes:
            self._room.clear()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._limits.journal_flush_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._waiting and self._failure is None:
            self._flush(sync=False)

    def _flush(self, *, sync: bool) -> Future[None]:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        items, self._waiting = self._waiting, []
        size, self._flushed_bytes = self._unwritten_bytes - self._flushed_bytes, self._unwritten_bytes
        loop = asyncio.get_running_loop()
        future = self._writer.submit(self._write, items, sync)
        future.add_done_callback(lambda done: _call_soon(loop, self._written, size, done.exception()))
        return future

    def _written(self, size: int, error: BaseException | None) -> None:
        self._unwritten_bytes -= size
        self._flushed_bytes -= size
        if isinstance(error, JournalFailed) and self._failure is None:
            self._failure = error
        if self._failure is not None or self._unwritten_bytes < self._limits.journal_queue_bytes:
            self._room.set()

    # ------------------------------------------------------------ the writer's side

    def _write(self, items: Iterable[ev.Event | StepBatch | _Prune], sync: bool) -> None:
        if self._broken is not None:
            raise self._broken
        try:
            self._transact(items, sync)
        except Exception as error:
            if is_short(self._path):
                self._broken = JournalFull(f"{without_room(self._path, 'the journal')} ({error})")
            else:
                self._broken = JournalFailed(f"the journal could not be written to {self._path}: {error}")
            raise self._broken from error

    def _transact(self, items: Iterable[ev.Event | StepBatch | _Prune], sync: bool) -> None:
        db = self._db
        # In WAL mode NORMAL survives the death of the process; only FULL survives a power cut. The file is synced
        # as a whole, so one FULL commit also makes durable what was written before it.
        db.execute(f"PRAGMA synchronous={'FULL' if sync else 'NORMAL'}")
        db.execute("BEGIN IMMEDIATE")
        rows: list[seals.EventRow] = []
        for item in items:
            if isinstance(item, StepBatch):
                self._put_samples(item)
            elif isinstance(item, _Prune):
                _insert(db, rows)
                self._seal ^= _prune(db, item.below)
            else:
                row = self._row(item)
                self._seal ^= int.from_bytes(row.hash)
                rows.append(row)
        _insert(db, rows)
        seals.store(db, self._seal)
        seals.store_samples(db, self._samples_seal)
        if sync:
            db.execute("INSERT OR REPLACE INTO meta VALUES ('durable_seq', ?)", (str(self._seq),))
        db.execute("COMMIT")

    def _put_samples(self, batch: StepBatch) -> None:
        rows = [msgspec.structs.astuple(sample) for sample in committed_rows(self._job, batch)]
        names = {row[:4] for row in rows}
        before = self._db.execute(
            "SELECT * FROM samples WHERE job = ? AND step = ?", (self._job, batch.step)
        ).fetchall()
        for row in [*rows, *(row for row in before if row[:4] in names)]:
            self._samples_seal ^= seals.sample_hash(row)
        self._db.executemany(_INSERT_SAMPLE, rows)

    def _row(self, event: ev.Event) -> seals.EventRow:
        self._seq += 1
        step = prune_step(event, self._newest_step)
        self._newest_step = max(self._newest_step, step)
        return seals.sealed(self._seq, ev.kind_of(event), self._job, step, ev.encode_event(event))


def _weight(item: ev.Event | StepBatch | _Prune) -> int:
    """About how many bytes an item holds until it is written; a batch stays in the ledger anyway."""
    if isinstance(item, StepBatch | _Prune):
        return _STRUCT_BYTES
    return _STRUCT_BYTES + sum(getattr(value, "nbytes", 0) for value in msgspec.structs.astuple(item))


_STRUCT_BYTES = 256
_LAST = "SELECT coalesce(max(seq), 0), coalesce(max(step), -1) FROM events"
_INSERT_SAMPLE = "INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


def _insert(db: sqlite3.Connection, rows: list[seals.EventRow]) -> None:
    db.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", rows)
    rows.clear()


def _prune(db: sqlite3.Connection, below: int) -> int:
    """Delete the events of steps below ``below``, except ``KEPT_KINDS``; returns the sum of their hashes."""
    which = f"WHERE step < ? AND kind NOT IN ({', '.join('?' * len(KEPT_KINDS))})"
    gone = seals.total(db.execute(f"SELECT hash FROM events {which}", (below, *KEPT_KINDS)))  # noqa: S608
    db.execute(f"DELETE FROM events {which}", (below, *KEPT_KINDS))  # noqa: S608
    db.execute("INSERT OR REPLACE INTO meta VALUES ('pruned_below', ?)", (str(below),))
    return gone


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        pass  # the loop is closed: nobody is left to be told


def _open(path: Path, job: str) -> sqlite3.Connection:
    try:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        db.execute(f"PRAGMA page_size={_PAGE_BYTES}")
        db.execute("PRAGMA journal_mode=WAL")
        db.executescript(_SCHEMA)
        found = dict(db.execute("SELECT name, value FROM meta").fetchall())
        version = int(found.setdefault("schema_version", str(SCHEMA_VERSION)))
        if version not in (SCHEMA_VERSION, _WITHOUT_HASHES):
            raise JournalUnreadable(f"{path} has schema {version}, not {SCHEMA_VERSION}: start a new run")
        if found.setdefault("job", job) != job:
            raise JournalUnreadable(f"{path} belongs to job {found['job']!r}, not {job!r}: use another run directory")
        db.execute("BEGIN IMMEDIATE")
        if version == _WITHOUT_HASHES:
            db.execute("ALTER TABLE events ADD COLUMN hash BLOB")
            found["schema_version"] = str(SCHEMA_VERSION)
        db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", found.items())
        db.execute("COMMIT")
    except (sqlite3.DatabaseError, ValueError) as error:
        if (full := no_space(error, path, "the journal")) is not None:
            raise full from error
        raise JournalDamaged(f"{path} is no journal, or is damaged: {error}; {seals.REMEDY}") from error
    return db


def _pruned_below(db: sqlite3.Connection) -> int:
    found = db.execute("SELECT value FROM meta WHERE name = 'pruned_below'").fetchone()
    return int(found[0]) if found else 0


def _events(db: sqlite3.Connection, rows: list[seals.EventRow]) -> list[ev.Event]:
    """Events up to the first one that cannot be read: a torn tail ends the journal, it does not end the run."""
    events: list[ev.Event] = []
    for row in rows:
        try:
            events.append(ev.decode_event(row.body))
        except (msgspec.DecodeError, ValueError):
            if row.seq <= seals.durable_seq(db):
                raise JournalDamaged(
                    f"event {row.seq} cannot be read, and it was durable: the file is damaged; {seals.REMEDY}"
                ) from None
            break
    return events


def committed_samples(path: Path) -> list[CommittedSample]:
    """Samples that a run trained on or dropped, in order of (step, prompt, sibling); the run may be going on.

    Raises:
        ConfigError: it is no plain file.
        JournalUnreadable: there is no journal at ``path``.
    """
    if not path.exists():
        raise JournalUnreadable(f"there is no journal at {path}")
    try:
        with opened(path) as db:
            found = db.execute("SELECT * FROM samples ORDER BY job, step, prompt, sibling").fetchall()
            return [CommittedSample.of_row(row) for row in found]
    except (sqlite3.DatabaseError, ValueError) as error:
        raise JournalUnreadable(f"{path.name} is no journal: {error}") from error
