"""Which hand-out is which sample.

Invariants
- An assignment number is given once in the life of a journal: ``term * 2**40 + counter``.
- A live number names one (step, row, worker); an ended or unknown one names nothing, so late tokens cannot enter.
"""

from __future__ import annotations

import numpy as np

TERM_STRIDE = 1 << 40
_COMPACT_AT = 65_536


class Slots:
    """Maps an assignment number to (step, row, worker), in columns."""

    def __init__(self) -> None:
        self.next = 0
        self._base = 0
        self._steps = np.empty(1024, np.int32)
        self._rows = np.empty(1024, np.int32)
        self._workers = np.empty(1024, np.int32)

    def reset(self, term: int) -> None:
        """End every hand-out and number the coming ones under ``term``."""
        self._base = self.next = term * TERM_STRIDE

    def skip_to(self, first: int) -> None:
        """Pass over the numbers before ``first``: their events were pruned, so they name nothing."""
        if first > self.next:
            self.give(-1, np.full(first - self.next, -1, np.int32), -1)

    def give(self, step: int, rows: np.ndarray, workers: np.ndarray | int) -> None:
        """Number ``rows`` from ``next`` on; ``workers``: int32[n], or one for all."""
        start, end = self.next - self._base, self.next - self._base + len(rows)
        if end > len(self._rows):
            size = max(end, 2 * len(self._rows))
            self._steps, self._rows, self._workers = (
                np.resize(column, size) for column in (self._steps, self._rows, self._workers)
            )
        self._steps[start:end] = step
        self._rows[start:end] = rows
        self._workers[start:end] = workers
        self.next += len(rows)

    def find(self, assignments: np.ndarray, worker: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
        """(steps, rows), int32[n] each; row -1 where the number is not live with this worker (or workers, int32[n])."""
        at = assignments - self._base
        live = (at >= 0) & (at < self.next - self._base)
        at = np.where(live, at, 0)
        rows = np.where(live & (self._workers[at] == worker), self._rows[at], -1)
        return self._steps[at], rows

    def workers_of(self, assignments: np.ndarray) -> np.ndarray:
        """int32[n] worker that holds each of these numbers, all of them live."""
        return self._workers[assignments - self._base]

    def end(self, assignments: np.ndarray) -> None:
        """Let these numbers, all of them live, name nothing any more."""
        self._rows[assignments - self._base] = -1

    def of_worker(self, worker: int) -> np.ndarray:
        """int64[n] live numbers of ``worker``."""
        n = self.next - self._base
        return np.nonzero((self._rows[:n] >= 0) & (self._workers[:n] == worker))[0] + self._base

    def compact(self) -> None:
        """Forget the ended numbers before the first live one, once there are many."""
        n = self.next - self._base
        if n < _COMPACT_AT:
            return
        live = np.nonzero(self._rows[:n] >= 0)[0]
        first = int(live[0]) if len(live) else n
        for column in (self._steps, self._rows, self._workers):
            column[: n - first] = column[first:n].copy()
        self._base += first
