"""What is read from a journal is what was written; and what is not is found, whatever has happened to the file."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from actors.host.room import NoSpaceLeft
from actors.ledger import events as ev
from actors.ledger import journal as journal_module
from actors.ledger import seals
from actors.ledger.errors import JournalDamaged, JournalFull, JournalUnreadable
from actors.ledger.journal import SqliteJournal
from configs.limits import DEFAULT_LIMITS


def commit(step: int) -> ev.Committed:
    return ev.Committed(step, np.arange(2, dtype=np.int64) + 2 * step, np.zeros(2, np.int32), step + 1)


async def written(path: Path, steps: int = 6) -> list[ev.Event]:
    events: list[ev.Event] = [ev.Opened(1), *(commit(step) for step in range(steps))]
    journal = SqliteJournal(path, "j")
    for event in events:
        journal.append(event)
    await journal.close()
    return events


def sql(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute(statement)
        db.commit()


async def read(path: Path) -> tuple[int, list[ev.Event]]:
    journal = SqliteJournal(path, "j")
    try:
        return journal.read()
    finally:
        await journal.close()


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        ("UPDATE events SET step = 5 WHERE seq = 3", r"event 3 \(committed\) was altered"),
        ("UPDATE events SET body = (SELECT body FROM events WHERE seq = 4) WHERE seq = 3", "event 3"),
        ("UPDATE events SET hash = NULL WHERE seq = 3", "event 3"),
        ("DELETE FROM events WHERE seq = 3", "events are missing, or were added"),
        ("DELETE FROM events WHERE seq >= 6", "the events after 5 are missing: 7 was the newest that is durable"),
        ("DELETE FROM events", "the events after 0 are missing"),
        ("INSERT INTO events SELECT 0, kind, job, step, body, hash FROM events WHERE seq = 2", "event 0"),
        ("UPDATE meta SET value = 'ab' WHERE name = 'seal'", "events are missing, or were added"),
    ],
)
async def test_what_was_altered_removed_or_added_is_found(tmp_path: Path, harm: str, told: str) -> None:
    await written(tmp_path / "journal.db")
    sql(tmp_path / "journal.db", harm)
    with pytest.raises(JournalDamaged, match=told) as found:
        await read(tmp_path / "journal.db")
    assert "headrace doctor --run" in str(found.value) and found.value.permanent


async def test_a_journal_is_whole_after_it_was_pruned_and_read_and_written_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    for life in range(3):
        journal = SqliteJournal(path, "j")
        _, events = journal.read()
        assert len(events) == 3 * life
        journal.append(ev.Opened(life + 1))
        for event in (commit(life), ev.Dropped(life, np.zeros(1, np.int32), "x"), ev.Paused(False)):
            journal.append(event)
        await journal.durable()
        journal.prune(life + 1)
        await journal.close()


@pytest.mark.parametrize("cut", [0, 100, 5000, 16384 + 37, 40000])
async def test_a_file_that_was_cut_is_damaged_or_empty_and_never_something_else(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal.db"
    await written(path, 400)
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    path.write_bytes(path.read_bytes()[:cut])
    try:
        _, events = await read(path)
    except JournalDamaged:
        return
    assert cut == 0 and events == []


@pytest.mark.parametrize("seed", range(12))
async def test_flipped_bytes_never_change_what_is_read(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "journal.db"
    before = [ev.encode_event(event) for event in await written(path, 200)]
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data, draw = bytearray(path.read_bytes()), np.random.default_rng(seed)
    for at in draw.integers(0, len(data), 3):
        data[at] ^= 1 << int(draw.integers(8))
    path.write_bytes(data)
    try:
        _, events = await read(path)
    except JournalUnreadable as error:  # the name of its job or its version may have been hit
        assert error.permanent
    else:
        assert [ev.encode_event(event) for event in events] == before


async def test_a_journal_of_before_there_were_hashes_goes_on_and_has_them_from_then_on(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    before = await written(path)
    with closing(sqlite3.connect(path)) as db:
        db.execute("ALTER TABLE events DROP COLUMN hash")
        db.execute("DELETE FROM meta WHERE name = 'seal'")
        db.execute("UPDATE meta SET value = '3' WHERE name = 'schema_version'")
        db.commit()
    journal = SqliteJournal(path, "j")
    assert len(journal.read()[1]) == len(before)
    journal.append(ev.Opened(2))
    await journal.close()
    assert len((await read(path))[1]) == len(before) + 1
    sql(path, "DELETE FROM events WHERE seq = 8")
    with pytest.raises(JournalDamaged):
        await read(path)


async def test_a_torn_tail_of_which_nobody_was_told_is_left_out_and_its_numbers_are_used_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    await written(path)
    sql(path, "INSERT INTO events VALUES (8, 'committed', 'j', 6, x'00', x'00')")
    journal = SqliteJournal(path, "j")
    assert len(journal.read()[1]) == 7
    journal.append(commit(6))
    await journal.close()
    assert len((await read(path))[1]) == 8


async def test_a_journal_is_not_opened_on_a_disk_without_room(tmp_path: Path) -> None:
    limits = DEFAULT_LIMITS.model_copy(update={"disk_reserve_bytes": 1 << 60})
    with pytest.raises(NoSpaceLeft, match="the journal needs"):
        SqliteJournal(tmp_path / "journal.db", "j", limits)
    assert not (tmp_path / "journal.db").exists()


@pytest.mark.parametrize("full", [True, False])
async def test_a_write_that_fails_is_permanent_only_if_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    is_short: Callable[[Path], bool] = lambda _: full  # noqa: E731
    monkeypatch.setattr(journal_module, "is_short", is_short)
    monkeypatch.setattr(SqliteJournal, "_transact", fail)
    journal = SqliteJournal(tmp_path / "journal.db", "j")
    journal.append(ev.Opened(1))
    what = r"no room at .*journal\.db, where .* are free: make room there \(" if full else r"written to .*journal\.db: "
    with pytest.raises(journal_module.JournalFailed, match=what + "database or disk is full") as failed:
        await journal.durable()
    assert isinstance(failed.value, JournalFull) is failed.value.permanent is full
    await journal.close()


def test_hashes_tell_rows_apart_that_differ_in_one_column() -> None:
    rows = [
        seals.sealed(1, "a", "j", 2, b"x"),
        seals.sealed(12, "a", "j", 2, b"x"),
        seals.sealed(1, "a", "j2", 2, b"x"),
    ]
    assert len({row.hash for row in rows}) == 3 and all(map(seals.is_intact, rows))
