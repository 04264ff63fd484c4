"""How long one token takes on a worker, by how many sequences it decodes and how long they are (StreamRL 1.6, PTL).

    TokenDelta.stats.step_s ─▶ LatencyMeter (one per worker life) ─▶ LatencyTable in the worker's view ─▶ policies

              context ≤ 256    ≤ 512    ≤ 1024 …
    batch 1      8.4 ms
    batch 2      8.8 ms        8.9 ms
    batch 4                    9.3 ms                    cells that nobody has been in stay empty

Captured from each worker's own step times, so a pool of different devices needs no other code.

Invariants
- A cell is a running mean of the newest steps; one slow step moves it by a bounded factor.
- Steps that prefill are left out: their time is mostly not that of decoding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

BATCHES: Final = 11
"""Rows: 1, 2, 4 … 1024 sequences; the last one takes all above."""
CONTEXTS: Final = 9
"""Columns: up to 256, 512 … 32768 tokens, and all above."""
_FIRST_CONTEXT: Final = 256
_WEIGHT: Final = 0.05
"""Of the newest step in a cell that has seen many."""
_SURPRISE: Final = 4.0
"""A step counts as at most this many times as slow, or as fast, as its cell."""


@dataclass(frozen=True, slots=True)
class LatencyTable:
    """Seconds of one decode step, float64[BATCHES, CONTEXTS]; NaN where nothing was measured."""

    seconds: np.ndarray
    batches: np.ndarray
    """Mean number of sequences in these steps, of the same shape; a row's power of two is only near it."""

    @property
    def empty(self) -> bool:
        return bool(np.isnan(self.seconds).all())

    def step_s(self, batch: float, context_tokens: float) -> float:
        """Expected time of one token for each of ``batch`` sequences; NaN while the table is empty.

        Between measured batches it is interpolated, beyond them it stays at the nearest; a context that has not been
        measured is taken as the nearest one that has.
        """
        if self.empty:
            return float("nan")
        rows, column = self._measured(context_tokens)
        return float(np.interp(np.log2(max(batch, 1.0)), rows, self.seconds[rows, column]))

    def throughput(self, context_tokens: float) -> dict[int, float]:
        """Measured batches → tokens/s, at the measured context that is nearest; empty while the table is.

        One context for all of them: throughput falls as samples grow, which must not pass for a plateau.
        """
        if self.empty:
            return {}
        rows, column = self._measured(context_tokens)
        batches = self.batches[rows, column]
        rates = batches / self.seconds[rows, column]
        return {round(batch): rate for batch, rate in zip(batches.tolist(), rates.tolist(), strict=True)}

    def _measured(self, context_tokens: float) -> tuple[np.ndarray, int]:
        """The rows that were measured in the column that is nearest to this context; of a table that is not empty."""
        known = ~np.isnan(self.seconds)
        columns = np.flatnonzero(known.any(axis=0))
        column = int(columns[np.abs(columns - _column(context_tokens)).argmin()])
        return np.flatnonzero(known[:, column]), column


class StepShape(NamedTuple):
    """What one engine step was about."""

    sequences: int
    """That gained tokens."""
    tokens: int
    generated: int
    """Tokens that these sequences had before, all together."""
    prefilled: bool
    """A sequence got its first token: its prompt was prefilled in this step."""


def step_shapes(offsets: np.ndarray, counts: np.ndarray, row_counts: np.ndarray) -> list[StepShape]:
    """Of deltas end to end: int32[n] first positions and token counts of rows; how many rows each delta has, > 0."""
    starts = np.cumsum(row_counts) - row_counts
    moved = counts > 0
    columns = (
        np.add.reduceat(moved, starts, dtype=np.int64),
        np.add.reduceat(counts, starts, dtype=np.int64),
        np.add.reduceat(np.where(moved, offsets, 0), starts, dtype=np.int64),
        np.logical_or.reduceat(moved & (offsets == 0), starts),
    )
    return [StepShape(*shape) for shape in zip(*(column.tolist() for column in columns), strict=True)]


class LatencyMeter:
    """Adds up one worker's steps. ``table`` is a snapshot, made anew only after a step was added."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], tuple[float, int, float]] = {}
        """Row and column → seconds, of how many steps, and their mean number of sequences."""
        self._table: LatencyTable | None = None
        self.context_tokens = 0.0
        """Mean length of the sequences of the newest step."""

    def add(self, step_s: float, shape: StepShape, prompt_tokens: float) -> None:
        """A worker's step, of prompts of about that length."""
        n = shape.sequences
        if n == 0:
            return
        self.context_tokens = prompt_tokens + shape.generated / n
        if step_s <= 0.0 or shape.prefilled:
            return
        cell = _row(n), _column(self.context_tokens)
        per_token_s = step_s * n / shape.tokens
        before, steps, batch = self._cells.get(cell, (per_token_s, 0, float(n)))
        per_token_s = min(max(per_token_s, before / _SURPRISE), before * _SURPRISE)
        weight = max(_WEIGHT, 1.0 / (steps + 1))
        per_token_s = before + weight * (per_token_s - before)
        self._cells[cell] = per_token_s, steps + 1, batch + weight * (n - batch)
        self._table = None

    @property
    def table(self) -> LatencyTable:
        if self._table is None:
            table = self._table = LatencyTable(*np.full((2, BATCHES, CONTEXTS), np.nan))
            for cell, (per_token_s, _, batch) in self._cells.items():
                table.seconds[cell], table.batches[cell] = per_token_s, batch
        return self._table


EMPTY: Final = LatencyMeter().table


def _row(batch: int) -> int:
    """Nearest power of two."""
    return min(round(math.log2(batch)), BATCHES - 1)


def _column(context_tokens: float) -> int:
    return min(max(math.ceil(math.log2(max(context_tokens, 1.0) / _FIRST_CONTEXT)), 0), CONTEXTS - 1)
