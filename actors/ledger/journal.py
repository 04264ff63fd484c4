"""The journal: the durable list of ledger events, and the committed samples in a table that people can read.

Invariants
- Events are kept in the order in which they were appended, and what is on disk is always a prefix of it.
- ``durable`` returns when everything appended before it would survive a power cut. Other events are group-committed
  within ``journal_flush_s``; what a crash may lose is the tail, which the ledger simply produces anew.
- ``append`` never waits and encodes nothing: that is the writer's. What is waiting is bounded, in bytes: ``room`` waits
  until there is space.
- A failed write is final: every later call raises JournalFailed, since the file no longer follows the ledger. The
  writer knows it before anybody is told, and writes nothing behind it, so that there is no hole.
- What is read is what was written: each event has a hash, and each transaction notes the sum of all of them, so that
  an event that was altered, removed or added is found (``seals.py``). Events of journals of 0.1 have none.

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
from actors.protocol.evaluations import is_evaluation
from configs.limits import DEFAULT_LIMITS, Limits

SCHEMA_VERSION = 4
_WITHOUT_HASHES = 3
"""Version whose events have no hash yet; it is made ours when it is opened."""
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
"""Small events that are never pruned: they say what was trained, what was learned of windows, and whether to go on."""


class Journal(Protocol):
    """The scheduler needs this of a journal."""

    def read(self) -> tuple[int, list[ev.Event]]:
        """The step below which events have been pruned, and all events."""
        ...

    def append(self, event: ev.Event) -> None: ...

    def record(self, batch: StepBatch) -> None:
        """Put the batch's samples into the ``samples`` table, with the step's commit."""
        ...

    async def room(self) -> None: ...

    async def durable(self) -> None:
        """Raises JournalFailed if the disk refuses."""
        ...

    def prune(self, below: int) -> None:
        """Delete the token payloads of steps below ``below``."""
        ...

    async def close(self) -> None: ...


def prune_step(event: ev.Event, newest: int) -> int:
    """The step with which an event may be pruned; ``newest`` is the newest issued step.

    A report may hold tokens of several steps: it may go with the newest one that it can refer to. So may what is of an
    evaluation, which runs beside that step.
    """
    of_all = isinstance(event, ev.Opened | ev.TokensAppended | ev.Returned | ev.Suspected | ev.Paused | ev.Stopping)
    return newest if of_all or is_evaluation(event.step) else event.step


@dataclass(frozen=True, slots=True)
class _Prune:
    below: int


class SqliteJournal:
    """It writes ``journal.db`` in WAL mode. Construct and ``read`` before the loop depends on it; both do disk work."""

    def __init__(self, path: Path, job: str, limits: Limits = DEFAULT_LIMITS) -> None:
        self._path = path
        self._job = job
        self._limits = limits
        self._newest_step = -1
        self._waiting: list[ev.Event | StepBatch | _Prune] = []
        self._unwritten_bytes = 0
        self._flushed_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._failure: JournalFailed | None = None
        self._room = asyncio.Event()
        self._room.set()
        self._broken: JournalFailed | None = None
        """Failure as the writer knows it: nothing is written behind what could not be."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")
        require_room(path, limits.disk_reserve_bytes, "the journal")
        self._db = _open(path, job)
        self._seq: int = self._db.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()[0]
        self._seal = seals.stored(self._db)

    @staticmethod
    def make(path: Path, job: str) -> None:
        """Make an empty journal."""
        _open(path, job).close()

    def read(self) -> tuple[int, list[ev.Event]]:
        """Raises:
        JournalDamaged: it is not what was written.
        """
        rows = seals.checked(self._db, self._path)
        events = _events(self._db, rows)
        newest = rows[len(events) - 1].seq if events else 0
        if newest < self._seq:  # what is torn is not there, and the next event takes its number
            self._db.execute("DELETE FROM events WHERE seq > ?", (newest,))
            self._seq, self._seal = newest, seals.total((row.hash,) for row in rows[: len(events)])
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
                await asyncio.shield(flushed)  # who no longer waits must not take back what others build on
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
                db.executemany(_INSERT_SAMPLE, [msgspec.structs.astuple(s) for s in committed_rows(self._job, item)])
            elif isinstance(item, _Prune):
                _insert(db, rows)
                self._seal ^= _prune(db, item.below)
            else:
                row = self._row(item)
                self._seal ^= int.from_bytes(row.hash)
                rows.append(row)
        _insert(db, rows)
        seals.store(db, self._seal)
        if sync:
            db.execute("INSERT OR REPLACE INTO meta VALUES ('durable_seq', ?)", (str(self._seq),))
        db.execute("COMMIT")

    def _row(self, event: ev.Event) -> seals.EventRow:
        self._seq += 1
        step = prune_step(event, self._newest_step)
        self._newest_step = max(self._newest_step, step)
        return seals.sealed(self._seq, ev.kind_of(event), self._job, step, ev.encode_event(event))


def _weight(item: ev.Event | StepBatch | _Prune) -> int:
    """About how many bytes it keeps until it is written; a batch stays in the ledger anyway."""
    if isinstance(item, StepBatch | _Prune):
        return _STRUCT_BYTES
    return _STRUCT_BYTES + sum(getattr(value, "nbytes", 0) for value in msgspec.structs.astuple(item))


_STRUCT_BYTES = 256
_INSERT_SAMPLE = "INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


def _insert(db: sqlite3.Connection, rows: list[seals.EventRow]) -> None:
    db.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", rows)
    rows.clear()


def _prune(db: sqlite3.Connection, below: int) -> int:
    """Delete them; returns the sum of their hashes."""
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
    """What a run trained on and what it dropped, in order of (step, prompt, sibling); reads while the run goes on.

    Raises:
        JournalUnreadable: there is no journal at ``path``.
    """
    if not path.exists():
        raise JournalUnreadable(f"there is no journal at {path}")
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        found = db.execute("SELECT * FROM samples ORDER BY job, step, prompt, sibling").fetchall()
    except sqlite3.DatabaseError as error:
        raise JournalUnreadable(f"{path.name} is no journal: {error}") from error
    finally:
        db.close()
    return [CommittedSample(*row) for row in found]
