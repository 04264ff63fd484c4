"""The operation log: what every client of the Tinker server asked, what it was answered, and where states lie.

    stored ──▶ executed ──▶ commit: answer, number, rows of saved weights, saved state ──▶ answered
    (model, number) once      one transaction                                               kept for those who ask again

Invariants
- A line is a model or a sampling session. (line, number) is stored once; a repeat changes nothing.
- A model's operations are committed in the order of their numbers, without gaps: ``done`` is the newest one.
- What an operation changes, its number and its answer are one transaction. A saved state is named in the transaction of
  the operation after which it was taken, and that transaction deletes the bodies that it makes needless.
- Executing again what ``to_replay`` names, on the saved state, gives the state after ``done``. An answer is never
  replaced.
- What an operation has used is in the same transaction: accounts count each once, through all deaths.
- A directory belongs to the log while a row names it; all others are leftover files (``directories.py``).
- Each body and answer has its hash: a damaged one is told of, and never executed or answered.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import xxhash

from actors.tinker.errors import LogUnreadable
from actors.tinker.learner import ModelSpec
from actors.tinker.log_writer import LogWriter
from actors.tinker.operations import Answer, Operation, encode, read_answer, read_operation
from actors.tinker.paths import read_path
from configs.limits import Limits

T = TypeVar("T")

_VERSION: Final = "1"
_HASH_BYTES: Final = 16
_PRUNE_EVERY: Final = 64
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sessions (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE, tenant TEXT, metadata BLOB, ended INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS models (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE, tenant TEXT, session TEXT, spec BLOB, metadata BLOB,
    done INTEGER DEFAULT -1, saved INTEGER DEFAULT -1, state TEXT, ended INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS operations (
    line TEXT, seq INTEGER, body BLOB, answer BLOB, replays INTEGER DEFAULT 0, UNIQUE (line, seq));
CREATE TABLE IF NOT EXISTS weights (
    model TEXT, kind TEXT, name TEXT, directory TEXT, expires_at REAL, PRIMARY KEY (model, kind, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS samplers (
    id TEXT PRIMARY KEY, tenant TEXT, session TEXT, base_model TEXT, path TEXT, model TEXT, directory TEXT,
    in_flight INTEGER DEFAULT 0, ended INTEGER DEFAULT 0) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS accounts (
    tenant TEXT, model TEXT, operations INTEGER, training_tokens INTEGER, sampled_tokens INTEGER, compute_s REAL,
    wait_s REAL, PRIMARY KEY (tenant, model)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS sampler_directories ON samplers (directory);
"""


class SessionRow(NamedTuple):
    """Holds a session: one client program."""

    id: str
    tenant: str
    ended: bool


@dataclass(frozen=True)
class ModelRow:
    """Holds a model, as of its newest committed operation."""

    number: int
    id: str
    tenant: str
    session: str
    spec: ModelSpec
    metadata: dict[str, Any]
    done: int
    """Number of the newest committed operation; -1: none yet."""
    saved: int
    """Number of the operation after which ``state`` was saved; -1: there is none."""
    state: str | None
    """Directory of the saved state."""
    ended: bool


class WeightsRow(NamedTuple):
    """Holds saved weights."""

    model: str
    kind: str
    name: str
    directory: str
    expires_at: float | None = None
    """Time of day, in seconds since 1970."""


class SamplerRow(NamedTuple):
    """Holds a sampling session."""

    id: str
    tenant: str
    session: str
    base_model: str
    path: str | None = None
    """Path of the weights, if they have a name."""
    model: str | None = None
    """Model whose snapshot it is, if the weights have no name."""
    directory: str | None = None
    """Directory of the snapshot; None: the base model."""
    in_flight: bool = False
    ended: bool = False

    @property
    def origin(self) -> str:
        """The model that its weights were saved from, or the base model."""
        return self.model or (read_path(self.path).run if self.path is not None else self.base_model)


class Spent(NamedTuple):
    """Holds what operations of one model, or samples of its weights, have used."""

    tenant: str
    model: str
    """Id of the model, or the name of a base model."""
    operations: int = 1
    training_tokens: int = 0
    """Tokens of calls ``forward`` and ``forward_backward``."""
    sampled_tokens: int = 0
    compute_s: float = 0.0
    """Seconds from the beginning to the end, with its turns at a shared service, and all that was made, loaded and
    executed again for it."""
    wait_s: float = 0.0
    """Seconds for which it could have begun, those before it being done, and did not."""


@dataclass(frozen=True)
class Outcome:
    """Holds what one operation has brought; all of it becomes durable at once."""

    answer: Answer
    replays: bool = False
    """Whether the operation has changed the model, and must be executed again after a death."""
    weights: WeightsRow | None = None
    sampler: SamplerRow | None = None
    state: str | None = None
    """Directory of the model's state after this operation, if it was saved."""


class OperationLog:
    """Writes and reads ``operations.db``; every coroutine returns once the disk has what it says."""

    def __init__(self, path: Path, limits: Limits, *, server_id: str | None = None) -> None:
        """Open the file, or make it. Blocks. Raises LogUnreadable."""
        self._path, self._limits = path, limits
        try:
            self._writer = LogWriter(path, limits.tinker_log_s)
            self.server_id = self._writer.run_now(lambda db: _prepare(db, server_id or secrets.token_hex(4)))
        except (sqlite3.DatabaseError, ValueError) as error:
            raise LogUnreadable(f"{path} is no operation log, or is damaged: {error}") from error

    def close(self) -> None:
        self._writer.close()

    async def _run(self, change: Callable[[sqlite3.Connection], T]) -> T:
        return await self._writer.run(change)

    # ------------------------------------------------------------ sessions, models, samplers, weights

    async def begin_session(self, tenant: str, metadata: dict[str, Any]) -> SessionRow:
        def change(db: sqlite3.Connection) -> SessionRow:
            body = msgspec.json.encode(metadata)
            cursor = db.execute("INSERT INTO sessions (tenant, metadata) VALUES (?, ?)", (tenant, body))
            row = SessionRow(f"{self.server_id}-{cursor.lastrowid}", tenant, ended=False)
            db.execute("UPDATE sessions SET id = ? WHERE number = ?", (row.id, cursor.lastrowid))
            return row

        return await self._run(change)

    async def end_session(self, session: str) -> None:
        """End a session, its models and its sampling sessions. What was saved under a name stays."""

        def change(db: sqlite3.Connection) -> None:
            db.execute("UPDATE sessions SET ended = 1 WHERE id = ?", (session,))
            for table in ("models", "samplers"):
                lines = f"SELECT id FROM {table} WHERE session = ?"  # noqa: S608
                db.execute(f"DELETE FROM operations WHERE line IN ({lines})", (session,))  # noqa: S608
                db.execute(f"UPDATE {table} SET ended = 1 WHERE session = ?", (session,))  # noqa: S608
            db.execute("UPDATE models SET state = NULL WHERE session = ?", (session,))

        await self._run(change)

    async def sessions(self) -> list[SessionRow]:
        query = "SELECT id, tenant, ended FROM sessions WHERE ended = 0 ORDER BY number"
        return await self._run(lambda db: [SessionRow(row[0], row[1], bool(row[2])) for row in db.execute(query)])

    async def session(self, session: str) -> SessionRow | None:
        rows = await self._run(
            lambda db: db.execute("SELECT id, tenant, ended FROM sessions WHERE id = ?", (session,)).fetchall()
        )
        return SessionRow(rows[0][0], rows[0][1], bool(rows[0][2])) if rows else None

    async def add_model(
        self, model: str, tenant: str, session: str, spec: ModelSpec, metadata: dict[str, Any]
    ) -> ModelRow:
        """The row of a model, made unless it is there."""

        def change(db: sqlite3.Connection) -> ModelRow:
            values = (model, tenant, session, msgspec.json.encode(spec), msgspec.json.encode(metadata))
            db.execute(
                "INSERT OR IGNORE INTO models (id, tenant, session, spec, metadata) VALUES (?, ?, ?, ?, ?)", values
            )
            return _models(db, "WHERE id = ?", (model,))[0]

        return await self._run(change)

    async def models(self) -> list[ModelRow]:
        """Models that have not ended, oldest first."""
        return await self._run(lambda db: _models(db, f"WHERE ended = 0 AND {_OF_LIVE_SESSIONS} ORDER BY number", ()))

    async def model(self, model: str) -> ModelRow | None:
        rows = await self._run(lambda db: _models(db, "WHERE id = ?", (model,)))
        return rows[0] if rows else None

    async def add_sampler(self, row: SamplerRow) -> None:
        await self._run(lambda db: _add_sampler(db, row))

    async def end_sampler(self, sampler: str) -> None:
        def change(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM operations WHERE line = ?", (sampler,))
            db.execute("UPDATE samplers SET ended = 1 WHERE id = ?", (sampler,))

        await self._run(change)

    async def samplers(self) -> list[SamplerRow]:
        """Sampling sessions that have not ended."""
        return await self._run(lambda db: _samplers(db, f"WHERE ended = 0 AND {_OF_LIVE_SESSIONS} ORDER BY id", ()))

    async def weights(self, model: str, kind: str, name: str) -> WeightsRow | None:
        query = f"SELECT {_WEIGHTS} FROM weights WHERE model = ? AND kind = ? AND name = ?"  # noqa: S608
        rows = await self._run(lambda db: db.execute(query, (model, kind, name)).fetchall())
        return WeightsRow(*rows[0]) if rows else None

    async def count_weights(self, tenant: str) -> int:
        query = "SELECT count(*) FROM weights WHERE model IN (SELECT id FROM models WHERE tenant = ?)"
        return await self._run(lambda db: db.execute(query, (tenant,)).fetchone()[0])

    async def expire_weights(self, now: float) -> int:
        """Forget the weights whose time is over at ``now``; returns how many."""
        query = "DELETE FROM weights WHERE expires_at IS NOT NULL AND expires_at <= ?"
        return await self._run(lambda db: db.execute(query, (now,)).rowcount)

    async def delete_weights(self, model: str, kind: str, name: str) -> None:
        query = "DELETE FROM weights WHERE model = ? AND kind = ? AND name = ?"
        await self._run(lambda db: db.execute(query, (model, kind, name)))

    async def weights_of(self, tenant: str) -> list[WeightsRow]:
        query = f"SELECT {_WEIGHTS} FROM weights WHERE model IN (SELECT id FROM models WHERE tenant = ?)"  # noqa: S608
        return await self._run(lambda db: [WeightsRow(*row) for row in db.execute(query, (tenant,))])

    async def directories(self) -> dict[str, str]:
        """Every directory that a row names, and the tenant whose it is."""
        query = """SELECT state, tenant FROM models WHERE state IS NOT NULL
            UNION SELECT directory, tenant FROM weights AS saved LEFT JOIN models ON models.id = saved.model
            UNION SELECT directory, tenant FROM samplers WHERE directory IS NOT NULL AND ended = 0"""
        return await self._run(lambda db: dict(db.execute(query).fetchall()))

    async def spent(self, *, alive: bool) -> list[Spent]:
        """What each tenant has used in all; ``alive``: of base models and of each model that has not ended."""
        sums = "sum(operations), sum(training_tokens), sum(sampled_tokens), sum(compute_s), sum(wait_s)"
        all_of = f"SELECT tenant, '', {sums} FROM accounts GROUP BY tenant"  # noqa: S608
        of_models = "SELECT * FROM accounts WHERE model NOT IN (SELECT id FROM models WHERE ended = 1)"
        return await self._run(lambda db: [Spent(*row) for row in db.execute(of_models if alive else all_of)])

    # ------------------------------------------------------------ operations

    async def store(self, line: str, seq: int, body: bytes) -> bool:
        """Keep an encoded operation, unless one of its number is there; returns whether it is new."""
        query = "INSERT OR IGNORE INTO operations (line, seq, body) VALUES (?, ?, ?)"
        values = (line, seq, _sealed(line, seq, body))
        return await self._run(lambda db: db.execute(query, values).rowcount == 1)

    async def waiting(self) -> list[tuple[str, int, int]]:
        """(line, number, bytes) of every operation that is not answered, in the order in which they were stored."""
        query = "SELECT line, seq, length(body) FROM operations WHERE answer IS NULL ORDER BY rowid"
        return await self._run(lambda db: db.execute(query).fetchall())

    async def operation(self, line: str, seq: int) -> Operation:
        """Raises LogUnreadable: it is damaged, or missing."""
        query = "SELECT body FROM operations WHERE line = ? AND seq = ?"
        rows = await self._run(lambda db: db.execute(query, (line, seq)).fetchall())
        return self._read(read_operation, line, seq, rows[0][0] if rows else None)

    async def answer(self, line: str, seq: int) -> Answer | None:
        """The kept answer; None if there is none yet, or none any more. Raises LogUnreadable: it is damaged."""
        query = "SELECT answer FROM operations WHERE line = ? AND seq = ? AND answer IS NOT NULL"
        rows = await self._run(lambda db: db.execute(query, (line, seq)).fetchall())
        return self._read(read_answer, line, seq, rows[0][0]) if rows else None

    async def to_replay(self, model: str) -> list[int]:
        """Numbers of the operations that lead from the saved state to the newest one, in order."""
        query = """SELECT seq FROM operations WHERE line = ?1 AND replays = 1
            AND seq > (SELECT saved FROM models WHERE id = ?1) ORDER BY seq"""
        return await self._run(lambda db: [int(row[0]) for row in db.execute(query, (model,))])

    async def commit(self, model: str, seq: int, outcome: Outcome, spent: Spent) -> None:
        """Make durable what the operation ``seq`` of a model has brought, and what it has used."""

        def change(db: sqlite3.Connection) -> None:
            done = db.execute("SELECT done FROM models WHERE id = ?", (model,)).fetchone()[0]
            assert done == seq - 1, f"{model}: operation {seq} is committed after {done}"
            self._settle(db, model, seq, outcome.answer, spent, replays=outcome.replays)
            db.execute("UPDATE models SET done = ? WHERE id = ?", (seq, model))
            if outcome.weights is not None:
                db.execute("INSERT OR REPLACE INTO weights VALUES (?, ?, ?, ?, ?)", outcome.weights)
            if outcome.sampler is not None:
                _add_sampler(db, outcome.sampler)
            if outcome.state is not None:
                _saved(db, model, seq, outcome.state)

        await self._run(change)

    async def saved(self, model: str, seq: int, state: str) -> None:
        """Name the state after the newest operation, ``seq``, when it was saved later than that was committed."""
        await self._run(lambda db: _saved(db, model, seq, state))

    async def settle(self, sampler: str, seq: int, answer: Answer, spent: Spent) -> None:
        """Keep the answer to a sample, and what it has used."""
        await self._run(lambda db: self._settle(db, sampler, seq, answer, spent, replays=False))

    def _settle(
        self, db: sqlite3.Connection, line: str, seq: int, answer: Answer, spent: Spent, *, replays: bool
    ) -> None:
        sealed = _sealed(line, seq, encode(answer))
        body = "body" if replays else "NULL"
        what = f"UPDATE operations SET answer = ?, replays = ?, body = {body}"  # noqa: S608
        values = (sealed, replays, line, seq)
        if db.execute(f"{what} WHERE line = ? AND seq = ? AND answer IS NULL", values).rowcount:
            db.execute(_ACCOUNT, spent)
        if seq % _PRUNE_EVERY == 0:
            _prune(db, line, self._limits)

    def _read(self, read: Callable[[bytes], T], line: str, seq: int, sealed: bytes | None) -> T:
        if not isinstance(sealed, bytes) or _sealed(line, seq, sealed[_HASH_BYTES:]) != sealed:
            raise LogUnreadable(f"{self._path}: operation {seq} of {line} is damaged or missing: go back to a copy")
        return read(sealed[_HASH_BYTES:])


_OF_LIVE_SESSIONS: Final = "session IN (SELECT id FROM sessions WHERE ended = 0)"
_WEIGHTS: Final = "model, kind, name, directory, expires_at"
_ACCOUNT: Final = """INSERT INTO accounts VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (tenant, model) DO UPDATE SET
    operations = operations + excluded.operations, training_tokens = training_tokens + excluded.training_tokens,
    sampled_tokens = sampled_tokens + excluded.sampled_tokens, compute_s = compute_s + excluded.compute_s,
    wait_s = wait_s + excluded.wait_s"""


def _prepare(db: sqlite3.Connection, server_id: str) -> str:
    """Make what is missing; returns the id of the server."""
    for statement in _SCHEMA.split(";"):
        db.execute(statement)
    found = dict(db.execute("SELECT name, value FROM meta").fetchall())
    if found.setdefault("version", _VERSION) != _VERSION:
        raise ValueError(f"it has version {found['version']}, not {_VERSION}")
    found.setdefault("server_id", server_id)
    db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", found.items())
    return found["server_id"]


def _sealed(line: str, seq: int, data: bytes) -> bytes:
    digest = xxhash.xxh3_128(f"{line}\n{seq}\n".encode())
    digest.update(data)
    return digest.digest() + data


def _models(db: sqlite3.Connection, where: str, values: tuple[object, ...]) -> list[ModelRow]:
    columns = "number, id, tenant, session, spec, metadata, done, saved, state, ended"
    rows = db.execute(f"SELECT {columns} FROM models {where}", values)  # noqa: S608
    return [
        ModelRow(
            number=row[0], id=row[1], tenant=row[2], session=row[3],
            spec=msgspec.json.decode(row[4], type=ModelSpec),
            metadata=msgspec.json.decode(row[5], type=dict[str, Any]),
            done=row[6], saved=row[7], state=row[8], ended=bool(row[9]),
        )
        for row in rows
    ]  # fmt: skip


def _samplers(db: sqlite3.Connection, where: str, values: tuple[object, ...]) -> list[SamplerRow]:
    columns = ", ".join(SamplerRow._fields)
    rows: Iterable[tuple[Any, ...]] = db.execute(f"SELECT {columns} FROM samplers {where}", values)  # noqa: S608
    return [SamplerRow(*row[:7], in_flight=bool(row[7]), ended=bool(row[8])) for row in rows]


def _add_sampler(db: sqlite3.Connection, row: SamplerRow) -> None:
    db.execute("INSERT OR IGNORE INTO samplers VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
    if row.in_flight:
        db.execute(
            "UPDATE samplers SET directory = ? WHERE model = ? AND in_flight = 1 AND ended = 0",
            (row.directory, row.model),
        )


def _saved(db: sqlite3.Connection, model: str, seq: int, state: str) -> None:
    db.execute("UPDATE models SET saved = ?, state = ? WHERE id = ?", (seq, state, model))
    needless = "UPDATE operations SET body = NULL, replays = 0 WHERE line = ? AND seq <= ? AND replays = 1"
    db.execute(needless, (model, seq))


def _prune(db: sqlite3.Connection, line: str, limits: Limits) -> None:
    """Delete the oldest answers beyond the limits; what may be executed again keeps its row."""
    query = """SELECT rowid, length(answer) FROM operations
        WHERE line = ? AND answer IS NOT NULL AND replays = 0 ORDER BY rowid DESC"""
    held_bytes, gone = 0, list[tuple[int]]()
    for place, (row, size) in enumerate(db.execute(query, (line,))):
        held_bytes += size
        if place and (place >= limits.tinker_answers or held_bytes > limits.tinker_answer_bytes):
            gone.append((row,))
    db.executemany("DELETE FROM operations WHERE rowid = ?", gone)
