"""How long one token takes on a worker, by how many sequences it decodes and how long they are (StreamRL 1.6, PTL).

    TokenReport.stats.step_s ─▶ LatencyMeter (one per worker life) ─▶ LatencyTable in the worker's view ─▶ policies

              context ≤ 256    ≤ 512    ≤ 1024 …
    batch 1      8.4 ms
    batch 2      8.8 ms        8.9 ms
    batch 4                    9.3 ms                    cells without a measured step stay empty

The times are each worker's own, so a pool of different devices needs no other code.

Invariants
- A cell is a running mean of the newest steps; one slow step moves it by a bounded factor.
- Steps that prefill are left out: their time is mostly not that of decoding.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

BATCHES: Final = 11
"""Number of rows: 1, 2, 4 … 1024 sequences; the last one takes all above."""
CONTEXTS: Final = 9
"""Number of columns: up to 256, 512 … 32768 tokens, and all above."""
_FIRST_CONTEXT: Final = 256
_WEIGHT: Final = 0.05
"""Weight of the newest step in a cell that has seen many."""
_SURPRISE: Final = 4.0
"""Largest factor by which a step counts as slower, or faster, than its cell."""


class Cell(NamedTuple):
    """Holds means over the steps of about one batch size and context."""

    seconds: float
    """Mean seconds in which such a step gives one token to each sequence."""
    steps: int
    sequences: float
    """Mean number of sequences in these steps."""


class Column(NamedTuple):
    """Holds what was measured at one context, by batch, ascending."""

    rows: Sequence[int]
    """Logarithms of the batches, to base 2."""
    seconds: Sequence[float]
    """Seconds of one decode step."""
    batches: Sequence[float]
    """Mean number of sequences in these steps; a row's power of two is only near it."""


@dataclass(frozen=True)
class LatencyTable:
    """Tells the seconds of one decode step. Plain Python: of a thousand tables in each round, few are asked."""

    cells: Mapping[tuple[int, int], Cell]
    """Measured cells by row and column."""

    @property
    def empty(self) -> bool:
        return not self.cells

    @cached_property
    def columns(self) -> dict[int, Column]:
        """The columns in which something was measured, ascending."""
        found: dict[int, list[tuple[int, float, float]]] = {}
        for (row, column), cell in sorted(self.cells.items()):
            found.setdefault(column, []).append((row, cell.seconds, cell.sequences))
        return {column: Column(*zip(*found[column], strict=True)) for column in sorted(found)}

    def step_s(self, batch: float, context_tokens: float) -> float:
        """Expected time of one token for each of ``batch`` sequences; NaN while the table is empty.

        Between measured batches it is interpolated, beyond them it stays at the nearest; a context that has not been
        measured is taken as the nearest one that has.
        """
        if self.empty:
            return float("nan")
        rows, seconds, _ = self._nearest(context_tokens)
        row = math.log2(max(batch, 1.0))
        above = bisect.bisect_right(rows, row)
        if above == 0 or above == len(rows):
            return seconds[max(0, above - 1)]
        slope = (seconds[above] - seconds[above - 1]) / (rows[above] - rows[above - 1])
        return slope * (row - rows[above - 1]) + seconds[above - 1]

    def curves(self, batch_max: int) -> np.ndarray:
        """``step_s`` of each batch 0 … ``batch_max``, float64[CONTEXTS, batch_max + 1]; rows: ``context_columns``."""
        batches = np.log2(np.maximum(np.arange(batch_max + 1), 1))
        found = {column: np.interp(batches, known.rows, known.seconds) for column, known in self.columns.items()}
        if not found:
            return np.full((CONTEXTS, batch_max + 1), np.nan)
        return np.array([found[min(found, key=lambda known: abs(known - column))] for column in range(CONTEXTS)])

    def throughput(self, context_tokens: float) -> dict[int, float]:
        """Measured batches → tokens/s, at the measured context that is nearest; empty while the table is.

        One context for all of them: throughput falls as samples grow, which must not pass for a plateau.
        """
        if self.empty:
            return {}
        _, seconds, batches = self._nearest(context_tokens)
        return {round(batch): batch / step_s for batch, step_s in zip(batches, seconds, strict=True)}

    def _nearest(self, context_tokens: float) -> Column:
        """The nearest column of a table that is not empty; of two, that of the shorter context."""
        wanted = _column(context_tokens)
        found = self.columns.get(wanted)
        return found or self.columns[min(self.columns, key=lambda column: abs(column - wanted))]


class StepShape(NamedTuple):
    """Tells what one engine step computed."""

    sequences: int
    """Sequences that gained tokens."""
    tokens: int
    generated: int
    """Tokens that these sequences had before, all together."""
    prefilled: bool
    """Whether a sequence got its first token: its prompt was prefilled in this step."""


def step_shapes(offsets: np.ndarray, counts: np.ndarray, row_counts: np.ndarray) -> list[StepShape]:
    """Shapes of reports end to end: int32[n] first positions and token counts of rows; rows of each report, > 0."""
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
        self._cells: dict[tuple[int, int], Cell] = {}
        self._table: LatencyTable | None = None
        self.context_tokens = 0.0
        """Mean length of the sequences of the newest step."""

    def add(self, step_s: float, shape: StepShape, prompt_tokens: float) -> None:
        """Add a step of the worker; ``prompt_tokens``: about the length of its prompts."""
        n = shape.sequences
        if n == 0:
            return
        self.context_tokens = prompt_tokens + shape.generated / n
        if not 0.0 < step_s < math.inf or shape.prefilled:
            return
        cell = _row(n), _column(self.context_tokens)
        per_token_s = step_s * n / shape.tokens
        before = self._cells.get(cell) or Cell(per_token_s, 0, float(n))
        per_token_s = min(max(per_token_s, before.seconds / _SURPRISE), before.seconds * _SURPRISE)
        weight = max(_WEIGHT, 1.0 / (before.steps + 1))
        self._cells[cell] = Cell(
            before.seconds + weight * (per_token_s - before.seconds),
            before.steps + 1,
            before.sequences + weight * (n - before.sequences),
        )
        self._table = None

    @property
    def table(self) -> LatencyTable:
        if self._table is None:
            self._table = LatencyTable(self._cells.copy())
        return self._table


EMPTY: Final = LatencyMeter().table


def mean_table(tables: Iterable[LatencyTable]) -> LatencyTable:
    """One table for all of these workers: each cell is a mean over their cells, weighted by steps."""
    cells: dict[tuple[int, int], Cell] = {}
    for table in tables:
        for key, new in table.cells.items():
            old = cells.get(key, new._replace(steps=0))
            steps = old.steps + new.steps
            weight = new.steps / max(steps, 1)
            seconds = old.seconds + weight * (new.seconds - old.seconds)
            cells[key] = Cell(seconds, steps, old.sequences + weight * (new.sequences - old.sequences))
    return LatencyTable(cells)


def context_columns(context_tokens: np.ndarray) -> np.ndarray:
    """Column of each of these contexts, int64[n]."""
    return np.clip(np.ceil(np.log2(np.maximum(context_tokens, 1.0) / _FIRST_CONTEXT)), 0, CONTEXTS - 1).astype(np.int64)


def _row(batch: int) -> int:
    """Row of the power of two that is nearest."""
    return min(round(math.log2(batch)), BATCHES - 1)


def _column(context_tokens: float) -> int:
    return min(max(math.ceil(math.log2(max(context_tokens, 1.0) / _FIRST_CONTEXT)), 0), CONTEXTS - 1)
