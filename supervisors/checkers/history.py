"""What is known of a run, real or simulated, over or not: the one input of every checker.

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
    """How far a run is. Only ``finished`` promises that every step is done."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    """The operator stopped the run after a checkpoint; it can be resumed."""
    FAILED = "failed"
    RUNNING = "running"
    CRASHED = "crashed"
    """The run is over without having recorded an end."""

    @property
    def in_order(self) -> bool:
        """Whether the run ended in order, so that all that it began must have ended too."""
        return self in (RunState.FINISHED, RunState.INTERRUPTED)


@dataclass(kw_only=True)
class History:
    """Holds everything that checkers may look at."""

    job: JobConfig
    state: RunState
    ledger: list[ev.Event] = field(default_factory=list[ev.Event])
    """Events of the journal."""
    pruned_below: int = 0
    vocabulary: int = 0
    """Number of token ids that the model has; 0: not known."""
    samples: list[CommittedSample] = field(default_factory=list[CommittedSample])
    """Samples of committed steps, as the ledger recorded them at the commit."""
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
    """A promise that was not kept: ``what`` in a sentence, and where, as far as that applies."""

    checker: str
    what: str
    step: int | None = None
    prompt: int | None = None
    sibling: int | None = None
    token_index: int | None = None
    worker: str | None = None

    @classmethod
    def of(
        cls,
        checker: str,
        sample: tuple[int, int, int],
        what: str,
        *,
        token_index: int | None = None,
        worker: str | None = None,
    ) -> Violation:
        """A violation that concerns ``sample``, given as (step, prompt, sibling)."""
        step, prompt, sibling = sample
        return cls(
            checker=checker, what=what, step=step, prompt=prompt, sibling=sibling,
            token_index=token_index, worker=worker,
        )  # fmt: skip

    def as_map(self) -> dict[str, Any]:
        """The violation as ``--json`` prints it: only what applies."""
        fields = ("checker", "what", "step", "prompt", "sibling", "token_index", "worker")
        return {name: value for name in fields if (value := getattr(self, name)) is not None}
