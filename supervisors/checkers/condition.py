"""Whether a run can go on from what its directory holds, and if not, which checkpoint it can go back to.

journal.db ── hashes, seal, durable_seq ──▶ whole, or what is wrong        its commits ─▶ how far it has come
checkpoints/step_* ── sizes and hashes ──▶ whole, or what is wrong

goes on       the newest checkpoint is one that the journal knows of, and can replay from
goes back     a whole checkpoint, and an intact commit of every step before it (``going_back.py``)
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from actors.ledger import events as ev
from actors.ledger import seals
from actors.ledger.errors import JournalDamaged, JournalUnreadable
from actors.ledger.read_only import opened
from actors.protocol.evaluations import version_of
from actors.trainer import checkpoint
from actors.trainer.errors import CheckpointCorrupt
from configs.errors import ConfigError
from configs.run_files import JOURNAL


@dataclass(frozen=True, kw_only=True)
class JournalRecord:
    """What a journal says of commits, as far as it can be read."""

    problem: str = ""
    """Sentence on what is wrong with the journal; empty: it is whole."""
    commits: dict[int, seals.EventRow] = field(default_factory=dict[int, seals.EventRow])
    """Newest intact commit of each step."""
    evaluated: dict[int, seals.EventRow] = field(default_factory=dict[int, seals.EventRow])
    """Intact result of each version that was evaluated."""
    terms: list[seals.EventRow] = field(default_factory=list[seals.EventRow])
    checkpoints: dict[int, seals.EventRow] = field(default_factory=dict[int, seals.EventRow])
    pruned_below: int = 0

    @property
    def committed_steps(self) -> int:
        return max(self.commits, default=-1) + 1

    def knows_all_below(self, step: int) -> bool:
        return all(known in self.commits for known in range(step))


@dataclass(frozen=True, kw_only=True)
class StoredCheckpoint:
    step: int
    path: Path
    problem: str = ""
    """Sentence on what is wrong with the checkpoint; empty: it is whole."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """Says what a run directory holds from which the run can go on."""

    run_dir: Path
    journal: JournalRecord
    checkpoints: list[StoredCheckpoint]
    """Checkpoints on disk, oldest first."""

    @property
    def back_to(self) -> int | None:
        """The newest step to which the run can go back."""
        whole = [c.step for c in self.checkpoints if not c.problem and self.journal.knows_all_below(c.step)]
        return whole[-1] if whole else None

    def problem(self) -> str:
        """Why the run cannot go on as it is, in a sentence; empty: it can."""
        journal, newest = self.journal, self.checkpoints[-1] if self.checkpoints else None
        if journal.problem:
            return journal.problem
        if newest is None:
            if journal.pruned_below:
                return f"its checkpoints are gone, and steps below {journal.pruned_below} cannot be trained again"
            return ""
        if newest.problem:
            return newest.problem
        if newest.step > journal.committed_steps:
            known = journal.committed_steps
            return f"{newest.path} is ahead of {JOURNAL}, which knows of {known} steps: its newest events are missing"
        if newest.step < journal.pruned_below:
            return f"{newest.path} is older than the steps that can be trained again, from {journal.pruned_below} on"
        return ""

    def remedy(self) -> str:
        """What to do about the problem, in a sentence."""
        if (step := self.back_to) is not None:
            return f"go back with headrace doctor --run {self.run_dir} --back-to {step}, then headrace run --resume"
        whole = [c.path for c in self.checkpoints if not c.problem]
        if whole:
            return (
                f"put {JOURNAL} back from a copy; or begin a new run from these weights: "
                f"headrace run JOB.yaml --set model.path={whole[-1]}"
            )
        return "put what is missing back from a copy, or begin a new run"


def look(run_dir: Path, *, hashes: bool = True) -> Condition:
    """What ``run_dir`` holds. ``hashes``: read every byte of every checkpoint, not their sizes alone."""
    found: list[StoredCheckpoint] = []
    for path in checkpoint.stored(run_dir):
        try:
            state = checkpoint.read(path, hashes=hashes)
            found.append(StoredCheckpoint(step=state.step, path=path))
        except CheckpointCorrupt as error:
            step = int(path.name.removeprefix("step_"))
            found.append(StoredCheckpoint(step=step, path=path, problem=str(error)))
    return Condition(run_dir=run_dir, journal=read_record(run_dir / JOURNAL, begun=bool(found)), checkpoints=found)


def read_record(path: Path, *, begun: bool) -> JournalRecord:
    """What the journal at ``path`` says. ``begun``: there are checkpoints, so the journal should exist."""
    if not path.exists():
        return JournalRecord(problem=f"{path} is missing, and the run has checkpoints" if begun else "")
    try:
        with opened(path) as db:
            problem = ""
            try:
                seals.checked(db, path)
            except JournalDamaged as error:
                problem = str(error).removesuffix(f"; {seals.REMEDY}")
            meta: dict[str, str] = dict(db.execute("SELECT name, value FROM meta").fetchall())
            rows = [row for row in seals.rows_of(db) if seals.is_intact(row)]
            record = JournalRecord(problem=problem, pruned_below=int(meta.get("pruned_below", 0)))
    except (sqlite3.DatabaseError, JournalUnreadable, ValueError, TypeError) as error:
        return JournalRecord(problem=f"{path} is no journal, or is damaged: {error}")
    for row in rows:
        try:
            event = ev.decode_event(row.body)
        except (msgspec.DecodeError, ValueError):
            continue
        if isinstance(event, ev.Committed):
            record.commits[event.step] = row
        elif isinstance(event, ev.Opened):
            record.terms.append(row)
        elif isinstance(event, ev.Checkpointed):
            record.checkpoints[event.step] = row
        elif isinstance(event, ev.Evaluated):
            record.evaluated[version_of(event.step)] = row
    return record


def check_can_go_on(run_dir: Path) -> None:
    """Refuse to resume from a directory that is damaged, incomplete, or at odds with its journal.

    Raises:
        ConfigError: says what is wrong, and what to do.
    """
    condition = look(run_dir, hashes=False)
    if problem := condition.problem():
        remedy = condition.remedy()
        raise ConfigError.of(f"--resume {run_dir}", "", problem, remedy[0].upper() + remedy[1:])
