"""What is known of a run once it is over, or so far: the one input of every checker, of real and simulated runs alike.

    RUN_DIR ── run_directory.read_history ──▶ ┐
    a simulated run, handed over from memory ─┴▶ History ─▶ checks.check ─▶ Report

Lists are in the order of recording. ``ledger`` may begin in the middle: of steps below ``pruned_below`` only the events
of ``KEPT_KINDS`` are left, and the rows of ``samples``.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.ledger import events as ev
from actors.ledger.committed import CommittedSample
from configs.schema import JobConfig

Row = Mapping[str, Any]


class RunState(enum.StrEnum):
    """A run state says how far a run is. Only ``finished`` promises that every step is done."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    """Its operator stopped it after a checkpoint; it can be resumed."""
    FAILED = "failed"
    RUNNING = "running"
    CRASHED = "crashed"
    """It is over without having said so."""

    @property
    def in_order(self) -> bool:
        """It ended by itself, so that what was begun must have been ended too."""
        return self in (RunState.FINISHED, RunState.INTERRUPTED)


@dataclass(kw_only=True)
class History:
    """A history holds everything that checkers may look at."""

    job: JobConfig
    state: RunState
    ledger: list[ev.Event] = field(default_factory=list[ev.Event])
    """Events of the journal."""
    pruned_below: int = 0
    samples: list[CommittedSample] = field(default_factory=list[CommittedSample])
    """Samples of committed steps, as the ledger put them down at the commit."""
    events: list[Row] = field(default_factory=list[Row])
    """Lines of events.jsonl: at least ``time_s`` and ``event`` each."""
    rows: list[Row] = field(default_factory=list[Row])
    """Lines of metrics.jsonl."""
    notes: list[str] = field(default_factory=list[str])
    """Notes for people on what could not be read."""

    def named(self, *names: str) -> list[Row]:
        """Events of these names, in order."""
        return [row for row in self.events if row.get("event") in names]


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A violation is a promise that was not kept: ``what`` in a sentence, and where, as far as that applies."""

    checker: str
    what: str
    step: int | None = None
    prompt: int | None = None
    sibling: int | None = None
    token_index: int | None = None
    worker: str | None = None

    def as_map(self) -> dict[str, Any]:
        """For ``--json``: only what applies."""
        fields = ("checker", "what", "step", "prompt", "sibling", "token_index", "worker")
        return {name: value for name in fields if (value := getattr(self, name)) is not None}
