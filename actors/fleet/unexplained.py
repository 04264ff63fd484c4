"""Workers that fell silent, until their machine has said how they ended: the samples of a crash are to be isolated.

    link lost ─▶ samples returned, kept back ─┬─ crashed ─▶ suspects: each prompt alone with a worker
                                              ├─ killed, stopped ─▶ handed out
                                              └─ no word for ``end_news_s`` ─▶ handed out; a late word still counts

A link that breaks says nothing of why. Without the pause the prompt that has just killed an engine would be with the
next one, among innocent ones, before it is known that there was a crash at all.

Invariants
- It keeps samples back, and moves none: the ledger has them queued all the while.
- What it keeps is bounded: a life is forgotten when it is explained, the oldest when there are too many.
"""

from __future__ import annotations

import numpy as np

from actors.ledger.batch import SampleState
from actors.ledger.ledger import Ledger

Rows = dict[int, np.ndarray]
"""Rows by step."""


class Unexplained:
    """It keeps the samples of silent workers, keyed by the incarnation of the life that held them."""

    def __init__(self, ledger: Ledger, lives_max: int) -> None:
        self._lives_max = lives_max
        self._ledger = ledger
        self._rows: dict[int, Rows] = {}
        self._kept_back: set[int] = set()
        self._ends: dict[int, bool] = {}
        """Lives that have ended and whose links are still to break, and whether each crashed."""

    def note_end(self, incarnation: int, *, crashed: bool) -> None:
        """Note an end of which the machine told before the link broke."""
        while len(self._ends) >= self._lives_max:
            del self._ends[next(iter(self._ends))]
        self._ends[incarnation] = crashed

    def end_of(self, incarnation: int) -> bool | None:
        """Whether that life crashed, None if nobody has said so; asked once."""
        return self._ends.pop(incarnation, None)

    def add(self, incarnation: int, rows: Rows) -> None:
        """A worker that held ``rows`` cannot be reached any more."""
        while len(self._rows) >= self._lives_max:
            self.release(oldest := next(iter(self._rows)))
            del self._rows[oldest]
        self._rows[incarnation] = rows
        self._kept_back.add(incarnation)

    def release(self, incarnation: int) -> bool:
        """Keep its samples back no longer; False if they were not."""
        kept = incarnation in self._kept_back
        self._kept_back.discard(incarnation)
        return kept

    def explain(self, incarnation: int) -> Rows:
        """Its end is known. Returns those of its samples that no engine has finished since; none if it is unknown."""
        self.release(incarnation)
        unfinished: Rows = {}
        for step, rows in self._rows.pop(incarnation, {}).items():
            batch = self._ledger.batches.get(step)
            if batch is not None and len(left := rows[batch.state[rows] < SampleState.FINISHED]):
                unfinished[step] = left
        return unfinished

    def kept_back(self, step: int) -> np.ndarray:
        """int32[n] rows of ``step`` that are not to be handed out yet."""
        rows = [self._rows[life][step] for life in self._kept_back if step in self._rows[life]]
        return np.concatenate(rows) if rows else np.empty(0, np.int32)
