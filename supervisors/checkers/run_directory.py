"""A run directory becomes a History: of a run that is finished, crashed or still going on. Nothing is changed in it.

    job.yaml ─▶ job        events.jsonl, metrics.jsonl ─▶ lines        journal.db ─▶ ledger events, samples

The journal is read last and in one transaction, so that of a run that goes on it is never older than the lines.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import psutil

from actors.host.bounded_file import former
from actors.ledger import events as ev
from actors.ledger.committed import CommittedSample
from actors.ledger.errors import JournalUnreadable
from configs.errors import ConfigError, Problem
from configs.loader import read_job
from supervisors.checkers.history import History, Row, RunState

JOB_FILE: Final = "job.yaml"
JOURNAL: Final = "journal.db"


def read_history(run_dir: Path) -> History:
    """What ``run_dir`` tells of its run.

    Raises:
        ConfigError: it is no run directory; the message says what is missing.
        JournalUnreadable: the journal is damaged or of another version.
    """
    check_directory(run_dir)
    job = read_job(run_dir / JOB_FILE)
    notes: list[str] = []
    alive = is_open(run_dir / JOURNAL)
    events = [*_lines(former(run_dir / "events.jsonl"), notes), *_lines(run_dir / "events.jsonl", notes)]
    if former(run_dir / "events.jsonl").exists():
        notes.append("events.jsonl has reached its bound (limits.events_max_bytes): events before that may be gone")
    rows = list(_lines(run_dir / "metrics.jsonl", notes))
    history = History(job=job, state=run_state(events, alive=alive), events=events, rows=rows, notes=notes)
    if empty := sum(row.get("samples") == 0 for row in rows):
        notes.append(f"{empty} of {len(rows)} steps trained on no sample; events.jsonl says why (samples_dropped)")
    if (run_dir / JOURNAL).exists():
        _read_journal(run_dir / JOURNAL, history)
    else:
        notes.append(f"there is no {JOURNAL}: the run ended before its first step")
    return history


def check_directory(run_dir: Path) -> None:
    """Raises ConfigError: it is no run directory; says what is missing."""

    def wrong(what: str, fix: str) -> ConfigError:
        return ConfigError([Problem(f"--run {run_dir}", "", what, fix)])

    if not run_dir.is_dir():
        raise wrong("there is no such directory", "Name a run directory, such as runs/quickstart")
    if not (run_dir / JOB_FILE).is_file():
        inside = sorted(path.parent.name for path in run_dir.glob(f"*/{JOB_FILE}"))
        fix = f"Name one of those in it: {', '.join(inside[:5])}" if inside else "A run directory holds job.yaml"
        raise wrong(f"is no run directory: it has no {JOB_FILE}", fix)


def run_state(events: Sequence[Row], *, alive: bool) -> RunState:
    """What the job last said, unless its process goes on, or ended without a word."""
    said = [str(row.get("state")) for row in events if row.get("event") == "job_state"]
    over = said[-1] if said and said[-1] in ("finished", "interrupted", "failed") else None
    if over is not None and not _opened_since(events):
        return RunState(over)
    return RunState.RUNNING if alive else RunState.CRASHED


def _opened_since(events: Sequence[Row]) -> bool:
    """Whether a scheduler has opened after the job last said how it is: a resumed run that has just begun."""
    for row in reversed(events):
        if row.get("event") == "scheduler_opened":
            return True
        if row.get("event") == "job_state":
            return False
    return False


def is_open(path: Path) -> bool:
    """Whether a process of this machine has ``path`` open. A head that lives elsewhere cannot be seen from here."""
    wanted = str(path.resolve())
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if any(file.path == wanted for file in process.open_files()):
                return True
        except (psutil.Error, OSError):
            continue  # gone meanwhile, or somebody else's
    return False


def _lines(path: Path, notes: list[str]) -> Iterator[Row]:
    """One map a line. What a crash has torn is passed over and noted."""
    if not path.exists():
        return
    torn = 0
    for line in path.read_text("utf-8", errors="replace").splitlines():
        try:
            value: Any = json.loads(line)
        except ValueError:
            torn += 1
            continue
        if isinstance(value, dict):
            yield cast("dict[str, Any]", value)
    if torn:
        notes.append(f"{path.name}: {torn} torn line{'s' if torn > 1 else ''} passed over")


def _read_journal(path: Path, history: History) -> None:
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            db.execute("BEGIN")
            meta: dict[str, str] = dict(db.execute("SELECT name, value FROM meta").fetchall())
            history.pruned_below = int(meta.get("pruned_below", 0))
            found = db.execute(
                "SELECT * FROM samples WHERE job = ? ORDER BY step, prompt, sibling", (history.job.name,)
            )
            history.samples = [CommittedSample(*row) for row in found.fetchall()]
            bodies = db.execute("SELECT seq, body FROM events ORDER BY seq").fetchall()
    except sqlite3.DatabaseError as error:
        raise JournalUnreadable(f"{path} cannot be read: {error}") from error
    durable = int(meta.get("durable_seq", 0))
    for seq, body in bodies:
        try:
            history.ledger.append(ev.decode_event(body))
        except (msgspec.DecodeError, ValueError) as error:
            if seq <= durable:
                raise JournalUnreadable(f"{path}: event {seq} cannot be read, and it was durable") from error
            history.notes.append(f"{path.name}: torn at event {seq} of {bodies[-1][0]}; nothing durable is lost")
            break
