"""Reads the History of a run from its directory, be it finished, crashed or still running, and changes nothing in it.

    job.yaml ─▶ job        events.jsonl, metrics.jsonl ─▶ lines        journal.db ─▶ ledger events, samples

The journal is read last and in one transaction, so that it is never older than the lines, even while the run goes on.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil

from actors.host.bounded_file import former
from actors.host.plain_file import json_object, newest_lines, require_plain
from actors.ledger import events as ev
from actors.ledger.committed import CommittedSample
from actors.ledger.errors import JournalUnreadable
from actors.ledger.read_only import opened
from actors.trainer.checkpoint import stored
from configs.errors import ConfigError
from configs.limits import DEFAULT_LIMITS
from configs.loader import read_job
from configs.model_files import ModelFileBroken, vocabulary
from configs.run_files import EVENTS, JOB_FILE, JOURNAL, METRICS
from configs.schema import JobConfig
from supervisors.checkers.history import History, Row, RunState


def read_history(run_dir: Path) -> History:
    """Read the History of the run in ``run_dir``.

    Raises:
        ConfigError: ``run_dir`` is no run directory; the message says what is missing.
        JournalUnreadable: the journal is damaged or of another version.
    """
    check_directory(run_dir)
    job = read_job(run_dir / JOB_FILE)
    notes: list[str] = []
    alive = is_open(run_dir / JOURNAL)
    events = [*_lines(former(run_dir / EVENTS), notes), *_lines(run_dir / EVENTS, notes)]
    if former(run_dir / EVENTS).exists():
        notes.append("events.jsonl has reached its bound (limits.events_max_bytes): events before that may be gone")
    rows = list(_lines(run_dir / METRICS, notes))
    history = History(job=job, state=run_state(events, alive=alive), events=events, rows=rows, notes=notes)
    history.vocabulary = _vocabulary(run_dir, job)
    if empty := sum(row.get("samples") == 0 for row in rows):
        notes.append(f"{empty} of {len(rows)} steps trained on no sample; events.jsonl says why (samples_dropped)")
    if (run_dir / JOURNAL).exists():
        _read_journal(run_dir / JOURNAL, history)
    else:
        notes.append(f"there is no {JOURNAL}: the run ended before its first step")
    return history


def _vocabulary(run_dir: Path, job: JobConfig) -> int:
    """Number of token ids of the run's model, by files below ``run_dir``, maybe a stranger's, alone; 0: not known."""
    places = [run_dir / "model", *reversed(stored(run_dir))]
    for place in places:
        require_plain(place / "config.json")
    with contextlib.suppress(ModelFileBroken):
        return next((found for place in places if (found := vocabulary(job, place))), 0)
    return 0


def check_directory(run_dir: Path) -> None:
    """Raises ConfigError: ``run_dir`` is no run directory; the message says what is missing."""

    def wrong(what: str, fix: str) -> ConfigError:
        return ConfigError.of(f"--run {run_dir}", "", what, fix)

    if not run_dir.is_dir():
        raise wrong("there is no such directory", "Name a run directory, such as runs/quickstart")
    if not (run_dir / JOB_FILE).is_file():
        inside = sorted(path.parent.name for path in run_dir.glob(f"*/{JOB_FILE}"))
        fix = f"Name one of those in it: {', '.join(inside[:5])}" if inside else "A run directory holds job.yaml"
        raise wrong(f"is no run directory: it has no {JOB_FILE}", fix)
    require_plain(run_dir / JOB_FILE)


def run_state(events: Sequence[Row], *, alive: bool) -> RunState:
    """The end that the job last reported; without one, ``RUNNING`` if its process is alive, else ``CRASHED``."""
    said = [str(row.get("state")) for row in events if row.get("event") == "job_state"]
    over = said[-1] if said and said[-1] in ("finished", "interrupted", "failed") else None
    if over is not None and not _opened_since(events):
        return RunState(over)
    return RunState.RUNNING if alive else RunState.CRASHED


def _opened_since(events: Sequence[Row]) -> bool:
    """Whether a scheduler was opened after the job last reported its state, as in a run that was just resumed."""
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
    """Yield one map per line. Lines that a crash has torn are skipped, and counted in ``notes``."""
    torn = 0
    for line in newest_lines(path, DEFAULT_LIMITS.run_record_bytes):
        if (row := json_object(line)) is not None:
            yield row
        elif line.strip():
            torn += 1
    if torn:
        notes.append(f"{path.name}: {torn} torn line{'s' if torn > 1 else ''} passed over")


def _read_journal(path: Path, history: History) -> None:
    try:
        with opened(path) as db:
            meta: dict[str, str] = dict(db.execute("SELECT name, value FROM meta").fetchall())
            found = db.execute(
                "SELECT * FROM samples WHERE job = ? ORDER BY step, prompt, sibling", (history.job.name,)
            )
            history.samples = [CommittedSample.of_row(row) for row in found.fetchall()]
            bodies = db.execute("SELECT seq, body FROM events ORDER BY seq").fetchall()
        history.pruned_below, durable = int(meta.get("pruned_below", 0)), int(meta.get("durable_seq", 0))
    except (sqlite3.DatabaseError, ValueError, TypeError) as error:
        raise JournalUnreadable(f"{path} cannot be read: {error}") from error
    for seq, body in bodies:
        try:
            history.ledger.append(ev.decode_event(body))
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
            if seq <= durable:
                raise JournalUnreadable(f"{path}: event {seq} cannot be read, and it was durable") from error
            history.notes.append(f"{path.name}: torn at event {seq} of {bodies[-1][0]}; nothing durable is lost")
            break
