"""``headrace doctor --run RUN_DIR --back-to STEP``: a run goes back to a checkpoint that is whole.

    journal.db, events.jsonl, metrics.jsonl, newer checkpoints ──▶ RUN_DIR/set-aside/N/     nothing is destroyed
    commits of the steps before STEP, their samples ─────────────▶ a new journal.db
    rows of the steps before STEP ───────────────────────────────▶ a new metrics.jsonl, and eval.jsonl
    wandb_id ──▶ RUN_DIR/set-aside/N/         Weights & Biases takes no step twice: the run goes on in a new run there

What comes after STEP has then not happened: ``headrace run --resume`` trains from the checkpoint on, with new samples.
Each file is replaced by a rename at the end, so that an interruption leaves the run as it was or as it is to be.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any, Final

from actors.host.best_link import remove_dangling
from actors.host.bounded_file import former
from actors.host.whole_file import replacing
from actors.ledger import events as ev
from actors.ledger import seals
from actors.ledger.journal import SqliteJournal
from actors.ledger.read_only import opened
from actors.trainer import checkpoint
from configs.errors import ConfigError
from configs.run_files import EVALUATIONS, EVENTS, JOURNAL, METRICS, WANDB_ID
from supervisors.checkers.condition import Condition, look
from supervisors.machine.run_directory import RunLock

ASIDE: Final = "set-aside"
_FOLLOWERS: Final = ("-wal", "-shm")


def go_back(run_dir: Path, step: int) -> Path:
    """Go back to the checkpoint of ``step``; returns where everything newer has been put.

    Raises:
        ConfigError: there is no such checkpoint, or the journal does not know what was trained before it.
        DirectoryInUse: the run lives.
    """
    with RunLock.take(run_dir):
        condition = look(run_dir)
        _check(condition, step)
        aside = _new_directory(run_dir / ASIDE)
        with replacing(run_dir / JOURNAL, lasting=True) as partial:
            _write_journal(partial, run_dir / JOURNAL, condition, step)
            for name in (JOURNAL, *(f"{JOURNAL}{end}" for end in _FOLLOWERS), METRICS, EVALUATIONS):
                if (run_dir / name).exists():
                    shutil.copy2(run_dir / name, aside / name)
            for newer in condition.checkpoints:
                if newer.step > step:
                    newer.path.rename(aside / newer.path.name)
            remove_dangling(checkpoint.checkpoints_directory(run_dir))
            for end in _FOLLOWERS:
                (run_dir / f"{JOURNAL}{end}").unlink(missing_ok=True)
        _cut_rows(run_dir / METRICS, "step", step - 1)
        _cut_rows(run_dir / EVALUATIONS, "version", step)
        for path in (run_dir / EVENTS, former(run_dir / EVENTS), run_dir / WANDB_ID):  # of steps that are undone
            if path.exists():
                path.rename(aside / path.name)
    return aside


def _check(condition: Condition, step: int) -> None:
    where, known = f"--back-to {step}", {c.step: c for c in condition.checkpoints}
    found = known.get(step)
    if found is None or found.problem:
        whole = [str(s) for s, c in known.items() if not c.problem and condition.journal.knows_all_below(s)]
        what = found.problem if found is not None else f"there is no checkpoint of step {step}"
        raise ConfigError.of(where, "", what, f"Those that are whole: {', '.join(whole) or 'none'}")
    if not condition.journal.knows_all_below(step):
        what = f"{JOURNAL} has no intact record of every step before it, so what was trained is not known"
        raise ConfigError.of(where, "", what, condition.remedy())


def _new_directory(parent: Path) -> Path:
    parent.mkdir(exist_ok=True)
    for number in count(1):
        made = parent / str(number)
        if not made.exists():
            made.mkdir()
            return made
    raise AssertionError("there is always a further number")


def _write_journal(path: Path, former: Path, condition: Condition, step: int) -> None:
    """A journal in which the steps before ``step`` are committed and checkpointed, and nothing else has happened."""
    for end in ("", *_FOLLOWERS):
        Path(f"{path}{end}").unlink(missing_ok=True)
    record = condition.journal
    rows = [*record.terms[-1:], *(record.commits[known] for known in range(step))]
    rows += [row for version, row in sorted(record.evaluated.items()) if version <= step]
    with opened(former) as db:
        job = str(dict(db.execute("SELECT name, value FROM meta").fetchall()).get("job", ""))
        samples = db.execute("SELECT * FROM samples WHERE step < ?", (step,)).fetchall()
    counters = _counters(record.checkpoints.get(step))
    taken = ev.Checkpointed(step, str(checkpoint.checkpoint_path(condition.run_dir, step)), counters)
    bodies = [row.body for row in rows] + [ev.encode_event(taken)]
    kinds = [(row.kind, row.job, row.step) for row in rows] + [("checkpointed", job, step)]
    sealed = [seals.sealed(at + 1, *kinds[at], body) for at, body in enumerate(bodies)]
    SqliteJournal.make(path, job)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA synchronous=FULL")
        db.execute("BEGIN IMMEDIATE")
        db.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", sealed)
        if samples:
            db.executemany(f"INSERT INTO samples VALUES ({', '.join('?' * len(samples[0]))})", samples)  # noqa: S608
        noted = {"durable_seq": str(len(sealed)), "pruned_below": str(step)}
        db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", noted.items())
        seals.store(db, seals.total((row.hash,) for row in sealed))
        seals.store_samples(db, seals.samples_total(db))
        db.execute("COMMIT")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.execute("PRAGMA journal_mode=DELETE")  # one file, to be renamed; the next run makes it WAL again


def _counters(row: seals.EventRow | None) -> dict[str, int]:
    """Counters of a checkpoint, without the prompts issued by then: some were for later steps, which get them anew."""
    event = ev.decode_event(row.body) if row is not None else None
    counters = event.counters if isinstance(event, ev.Checkpointed) else {}
    return {name: value for name, value in counters.items() if name != "prompts_used"}


def _cut_rows(path: Path, key: str, last: int) -> None:
    """Keep only the rows whose ``key`` is at most ``last``."""
    if not path.exists():
        return
    with replacing(path, lasting=True) as partial, path.open("rb") as rows, partial.open("wb") as kept:
        kept.writelines(line for line in rows if _number(line, key) <= last)


def _number(line: bytes, key: str) -> float:
    try:
        row: Any = json.loads(line)
        return int(row[key])
    except (ValueError, KeyError, TypeError):
        return float("inf")
