"""``headrace doctor --run`` on directories of runs that finished, crashed, go on, were tampered with, or are none."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from actors.ledger import seals
from actors.ledger.journal import SqliteJournal
from configs.errors import ConfigError
from configs.loader import dump_job
from supervisors.checkers.checks import check
from supervisors.checkers.history import History, RunState
from supervisors.checkers.run_directory import read_history
from supervisors.cli.app import app
from tests.supervisors.checkers.recorded import still_running, with_faults


def write(run_dir: Path, history: History) -> Path:
    """The run directory that ``history`` would have left, the journal by the real journal."""
    run_dir.mkdir(parents=True)
    (run_dir / "job.yaml").write_text(dump_job(history.job))
    (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in history.events))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history.rows))
    asyncio.run(_write_journal(run_dir / "journal.db", history))
    return run_dir


async def _write_journal(path: Path, history: History) -> None:
    journal = SqliteJournal(path, history.job.name)
    for event in history.ledger:
        journal.append(event)
    await journal.close()
    journal._writer.shutdown()  # until then its connection is open, and with it the log of what is not in the file yet
    with closing(sqlite3.connect(path)) as db, db:
        rows = [msgspec.structs.astuple(sample) for sample in history.samples]
        db.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        seals.store_samples(db, seals.samples_total(db))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write(tmp_path / "run", with_faults())


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


def sql(run_dir: Path, statement: str) -> None:
    with closing(sqlite3.connect(run_dir / "journal.db")) as db, db:
        assert db.execute(statement).rowcount > 0


def test_a_directory_tells_the_same_history_as_memory(run_dir: Path) -> None:
    history = read_history(run_dir)
    assert history.state is RunState.FINISHED
    assert history.samples == with_faults().samples
    assert [type(e) for e in history.ledger] == [type(e) for e in with_faults().ledger]
    assert check(history).counted == check(with_faults()).counted


def test_a_clean_run_ends_with_0_in_a_table_and_in_json(run_dir: Path) -> None:
    shown = doctor("--run", str(run_dir))
    assert (shown.exit_code, "finished" in shown.stdout, "4 of 4 steps committed" in shown.stdout) == (0, True, True)
    told = json.loads(doctor("--run", str(run_dir), "--json").stdout)
    assert (told["clean"], told["state"], told["steps"], told["violations"]) == (True, "finished", 4, [])
    assert told["checked"]["tokens"] == told["checked"]["tokens_followed"]
    assert set(told["checkers"].values()) == {0}


def test_a_pipe_in_place_of_the_models_config_is_never_waited_for(run_dir: Path) -> None:
    (run_dir / "model").mkdir()
    os.mkfifo(run_dir / "model" / "config.json")
    with pytest.raises(ConfigError, match="is no plain file"):
        read_history(run_dir)


def test_a_violation_ends_with_1_and_is_spelled_out(run_dir: Path) -> None:
    sql(run_dir, "UPDATE samples SET n_tokens = n_tokens + 1 WHERE step = 1 AND prompt = 6 AND sibling = 3")
    shown = doctor("--run", str(run_dir))
    assert shown.exit_code == 1
    assert "step 1 prompt 6 sibling 3 has" in shown.stdout
    told = doctor("--run", str(run_dir), "--json")
    assert told.exit_code == 1
    [violation] = json.loads(told.stdout)["violations"]
    assert (violation["checker"], violation["step"], violation["prompt"], violation["sibling"]) == ("tokens", 1, 6, 3)
    assert {"token_index", "worker", "what"} <= set(violation)


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda path: None, "there is no such directory"),
        (lambda path: path.mkdir(), "is no run directory: it has no job.yaml"),
        (lambda path: write(path / "quickstart", with_faults()), "Name one of those in it: quickstart"),
    ],
)
def test_what_is_no_run_directory_ends_with_2_and_the_way_to_one(
    tmp_path: Path, prepare: Callable[[Path], Any], says: str
) -> None:
    prepare(tmp_path / "there")
    result = doctor("--run", str(tmp_path / "there"), "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr
    assert f"--run {tmp_path / 'there'}" in result.stderr


def test_a_journal_that_is_none_ends_with_1_and_says_so(run_dir: Path) -> None:
    (run_dir / "journal.db").write_bytes(b"not a database, but long enough to be looked at as one" * 9)
    result = doctor("--run", str(run_dir))
    assert (result.exit_code, "JournalUnreadable" in result.stderr) == (1, True)


def test_a_crashed_run_is_told_from_one_that_goes_on(tmp_path: Path) -> None:
    run_dir = write(tmp_path / "run", still_running())
    assert read_history(run_dir).state is RunState.CRASHED
    with (run_dir / "events.jsonl").open("a") as file:
        file.write('{"time_s": 17')
    told = json.loads(doctor("--run", str(run_dir), "--json").stdout)
    assert (told["state"], told["clean"], told["steps"]) == ("crashed", True, 1)
    assert told["notes"] == ["events.jsonl: 1 torn line passed over"]


def test_a_run_whose_journal_is_open_is_running_and_can_be_read_meanwhile(tmp_path: Path) -> None:
    """Another process has it open and writes."""
    import subprocess
    import sys

    run_dir = write(tmp_path / "run", still_running())
    program = (
        "import sqlite3, sys\n"
        f"db = sqlite3.connect({str(run_dir / 'journal.db')!r})\n"
        "db.execute('BEGIN IMMEDIATE')\n"
        "db.execute(\"INSERT OR REPLACE INTO meta VALUES ('x', 'y')\")\n"
        "print('open', flush=True); sys.stdin.read()\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "open\n"
        history = read_history(run_dir)
        assert history.state is RunState.RUNNING
        assert check(history).clean
    finally:
        holder.communicate("")


def test_a_resumed_run_that_has_just_begun_is_running_although_it_was_interrupted(tmp_path: Path) -> None:
    from supervisors.checkers.run_directory import run_state

    ended = {"event": "job_state", "state": "interrupted"}
    opened = {"event": "scheduler_opened", "term": 2}
    assert run_state([ended], alive=False) is RunState.INTERRUPTED
    assert run_state([ended], alive=True) is RunState.INTERRUPTED
    assert run_state([ended, opened], alive=True) is RunState.RUNNING
    assert run_state([ended, opened], alive=False) is RunState.CRASHED
    assert run_state([ended, opened, {"event": "job_state", "state": "running"}], alive=False) is RunState.CRASHED


def test_a_torn_tail_of_the_journal_is_noted_and_a_damaged_middle_refused(run_dir: Path) -> None:
    sql(run_dir, "UPDATE meta SET value = 20 WHERE name = 'durable_seq'")
    sql(run_dir, "UPDATE events SET body = x'00' WHERE seq = (SELECT max(seq) FROM events)")
    [note] = read_history(run_dir).notes
    assert "torn at event" in note
    sql(run_dir, "UPDATE events SET body = x'00' WHERE seq = 7")
    result = doctor("--run", str(run_dir))
    assert result.exit_code == 1 and "event 7" in result.stderr and "its hash differs" in result.stderr


def test_a_run_that_ended_before_its_first_step_is_no_error(run_dir: Path) -> None:
    for name in ("journal.db", "events.jsonl", "metrics.jsonl"):
        (run_dir / name).unlink()
    told = json.loads(doctor("--run", str(run_dir), "--json").stdout)
    assert (told["state"], told["clean"], told["steps"]) == ("crashed", True, 0)
    assert "there is no journal.db" in told["notes"][0]


def test_steps_that_trained_on_no_sample_are_noted(run_dir: Path) -> None:
    """They break no promise, and nobody wants them."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows[0] |= {"samples": 0, "reward_mean": None}
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert f"1 of {len(rows)} steps trained on no sample" in doctor("--run", str(run_dir)).stdout
