"""A journal is read as what it is: tables of a size, and nothing that computes."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from actors.ledger import read_only
from actors.ledger.committed import CommittedSample
from actors.ledger.errors import JournalUnreadable
from actors.ledger.journal import SqliteJournal, committed_samples

SAMPLE = ("demo", 0, 0, 0, "committed", "", 5, 0.5, "stop", 0, 0, 1, "")


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    file = tmp_path / "a b#c?d%20e" / "journal.db"
    file.parent.mkdir()
    SqliteJournal.make(file, "demo")
    with closing(sqlite3.connect(file)) as db:
        rows = [(*SAMPLE[:2], prompt, *SAMPLE[3:]) for prompt in range(500)]
        db.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        db.commit()
    return file


def test_it_is_read_whatever_its_path_is_called(journal: Path) -> None:
    assert [sample.prompt for sample in committed_samples(journal)] == list(range(500))
    assert {file.name for file in journal.parent.parent.iterdir()} == {journal.parent.name}


def test_a_view_in_it_is_not_run(journal: Path) -> None:
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"
    with closing(sqlite3.connect(journal)) as db:
        db.executescript(f"DROP TABLE samples; CREATE VIEW samples AS {endless};")
    with pytest.raises(JournalUnreadable, match="it holds a view 'samples', expected tables alone"):
        committed_samples(journal)


def test_a_query_that_takes_longer_than_the_size_of_the_file_explains_is_interrupted(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages may refer to each other so that a small file has rows without end."""
    monkeypatch.setattr(read_only, "_OPERATIONS_LEAST", 100)
    monkeypatch.setattr(read_only, "_OPERATIONS_A_BYTE", 0)
    monkeypatch.setattr(read_only, "_ASKED_EVERY", 10)
    with pytest.raises(JournalUnreadable, match="interrupted"):
        committed_samples(journal)


@pytest.mark.parametrize("odd", [{6: -1}, {6: 1 << 40}, {6: "x"}, {4: 3}, {2: None}])
def test_a_row_that_no_run_has_written_is_named(odd: dict[int, object]) -> None:
    with pytest.raises(ValueError, match="a row of samples"):
        CommittedSample.of_row([odd.get(at, value) for at, value in enumerate(SAMPLE)])
