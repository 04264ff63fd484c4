"""What an event has done to the ledger, which the scheduler acts on; and the ways in which a hand-out ends.

Invariants
- An Outcome is no state: equal events give equal ledgers, whether anybody looks at their outcomes or not.
- A hand-out ends once. Its sample is then finished (an episode waits for its environment), or queued again, to go on
  behind the tokens that the ledger has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from actors.ledger.batch import SampleState, StepBatch
from actors.protocol.tokens import FinishReason

K = TypeVar("K", int, str)


@dataclass(slots=True)
class Outcome:
    """Tells what an event has done. Rows are int32[n] by step, assignments int64[n] by worker."""

    tokens: int = 0
    finished: dict[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])
    """Rows that the event has finished."""
    waiting: dict[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])
    """Rows whose turn the event has ended: they wait for their environments."""
    queued: dict[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])
    """Rows that the event has put into the queue, or back into it."""
    ended: dict[str, int] = field(default_factory=dict[str, int])
    """Number of each worker's hand-outs that are over, finished ones included."""
    broken: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    """Assignments that run on their worker but are no longer valid (gap, overlap, not live, ended): revoke them."""

    def count_ended(self, worker: str, hand_outs: int) -> None:
        """Add hand-outs of ``worker`` that are over."""
        if hand_outs:
            self.ended[worker] = self.ended.get(worker, 0) + hand_outs

    def note_broken(self, worker: str, assignments: np.ndarray) -> None:
        """Add assignments of ``worker`` that run on though they should not."""
        if len(assignments):
            _join(self.broken, worker, assignments)


@dataclass(slots=True)
class Counters:
    """Holds counters that only grow. ``prompts_lost`` and ``samples_trained_twice`` stay 0 in a correct system."""

    tokens: int = 0
    """Number of tokens that the model has said."""
    tokens_discarded: int = 0
    """Number of those tokens that were cut off an episode."""
    unknown_rows: int = 0
    duplicate_rows: int = 0
    gap_rows: int = 0
    samples_migrated: int = 0
    prompts_lost: int = 0
    samples_trained_twice: int = 0
    dropped: int = 0
    prompts_used: int = 0
    """First ordinal that no batch has used; a counter, so that checkpoints tell it when events were pruned."""
    evaluation_tokens: int = 0
    """Number of tokens of evaluations, which are in none of the other counts."""


def finish(batch: StepBatch, rows: np.ndarray, reasons: np.ndarray | int, outcome: Outcome) -> None:
    """End ``rows``, or of episodes their present turns; ``reasons``: FinishReason of each, or of all."""
    if not len(rows):
        return
    batch.finish[rows] = reasons
    if batch.episodes is not None:
        let_wait(batch, rows, outcome)
        return
    batch.state[rows] = SampleState.FINISHED
    batch.assignment[rows] = -1
    _join(outcome.finished, batch.step, rows)


def let_wait(batch: StepBatch, rows: np.ndarray, outcome: Outcome) -> None:
    """Have the episodes ``rows`` wait for their environments."""
    batch.state[rows] = SampleState.WAITING
    batch.assignment[rows] = -1
    _join(outcome.waiting, batch.step, rows)


def give_back(batch: StepBatch, rows: np.ndarray, outcome: Outcome) -> None:
    """Put ``rows`` back into the queue, unless the tokens already end the sample, or its turn."""
    if not len(rows):
        return
    stopped, spent = batch.ended(rows)
    finish(batch, rows[stopped], FinishReason.STOP, outcome)
    finish(batch, rows[spent], FinishReason.LENGTH, outcome)
    rows = rows[~stopped & ~spent]
    batch.state[rows] = SampleState.QUEUED
    batch.assignment[rows] = -1
    if len(rows):
        _join(outcome.queued, batch.step, rows)


def _join(parts: dict[K, np.ndarray], key: K, more: np.ndarray) -> None:
    before = parts.get(key)
    parts[key] = more if before is None else np.concatenate([before, more])
