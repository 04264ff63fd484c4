"""How tokens enter the ledger: all reports that came together, in columns.

    reports ─▶ of which sample is each row, and does it begin where that sample ends?
                 │ workers with only such rows                  │ the other workers
                 ▼                                              ▼
              _enter: all at once                            _judge: one report after the other, row by row

Invariants
- A row enters only if its assignment is live with that worker and it goes on exactly where the sample ends; every other
  row is counted (unknown, duplicate, gap) and ignored.
- It makes no difference which way a report takes, nor which others it comes with: workers share no sample.
- No Python code runs per token; code runs per row only where something is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from actors.ledger.batch import SampleState, StepBatch
from actors.ledger.errors import IllegalTransition
from actors.ledger.events import TokensAppended
from actors.ledger.ledger_state import distinct
from actors.ledger.outcome import Counters, Outcome, finish, give_back
from actors.ledger.slots import Slots
from actors.protocol.evaluations import is_evaluation
from actors.protocol.tokens import FinishReason


class TokenEntry:
    """Enters tokens into the ledger's own columns: ``batches`` by step, ``workers`` by name."""

    def __init__(
        self, batches: dict[int, StepBatch], slots: Slots, workers: dict[str, int], counters: Counters
    ) -> None:
        self._batches, self._slots, self._workers, self._counters = batches, slots, workers, counters

    def enter(self, event: TokensAppended) -> Outcome:
        """Enter the rows that go on where their samples end, and count the others.

        Raises:
            IllegalTransition: the columns do not fit each other; nothing has changed.
        """
        _check_columns(event)
        outcome = Outcome()
        workers = np.array([self._workers.get(name, -1) for name in event.workers], np.int32)
        of_row = np.repeat(workers, event.row_counts)
        steps, rows = self._slots.find(event.assignments, of_row)
        if event.routes is not None:
            for step in distinct(steps[rows >= 0]):
                self._batches[step].check_routes(event.routes)
        wrong = ~self._follow_on(event, steps, rows)
        if not wrong.any():
            self._enter(event, steps, rows, None, outcome)
            return outcome
        odd = np.unique(of_row[wrong])
        self._enter(event, steps, rows, ~np.isin(of_row, odd), outcome)
        for report, is_odd in zip(event.split(), np.isin(workers, odd).tolist(), strict=True):
            if is_odd:
                self._judge(report, outcome)
        return outcome

    def _follow_on(self, event: TokensAppended, steps: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """bool[n] which rows go on exactly where their sample ends, once the rows before them are entered."""
        right = (rows >= 0) & (event.finished <= FinishReason.ABORTED)
        ends, budget = self._ends(steps, rows, right)
        order = np.argsort(event.assignments, kind="stable")
        numbers, counts = event.assignments[order], event.counts[order]
        again = numbers[1:] == numbers[:-1]
        if again.any():
            before = np.cumsum(counts) - counts
            first = np.append(True, ~again)
            ends[order] += before - before[first][np.cumsum(first) - 1]
            right[order[1:]] &= ~again | (event.finished[order[:-1]] == FinishReason.RUNNING)
        return right & (event.offsets == ends) & (event.offsets + event.counts <= budget)

    def _ends(self, steps: np.ndarray, rows: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray | int]:
        """Where the samples of the ``right`` rows end, and may end: int32[n] each, or one budget for all."""
        present = distinct(steps[right])
        if len(present) == 1 and right.all():
            batch = self._batches[present[0]]
            return batch.length[rows], batch.limits(rows)
        ends, budget = np.zeros((2, len(rows)), np.int32)
        for step in present:
            of_step = right & (steps == step)
            ends[of_step] = self._batches[step].length[rows[of_step]]
            budget[of_step] = self._batches[step].limits(rows[of_step])
        return ends, budget

    def _enter(
        self, event: TokensAppended, steps: np.ndarray, rows: np.ndarray, pick: np.ndarray | None, outcome: Outcome
    ) -> None:
        """Enter the rows of ``pick``, all of which go on where their samples end; None: every row."""
        for step in distinct(steps if pick is None else steps[pick]):
            of_step = steps == step if pick is None else pick & (steps == step)
            whole = bool(of_step.all())
            at = slice(None) if whole else of_step
            flat = slice(None) if whole else np.repeat(of_step, event.counts)
            versions = _version_of_rows(event)
            self._write(
                self._batches[step], rows[at], event.offsets[at], event.counts[at],
                versions if isinstance(versions, int) else versions[at],
                event.tokens[flat], event.logprobs[flat], None if event.routes is None else event.routes[flat], outcome,
            )  # fmt: skip
            if event.finished[at].any():
                of_row = np.repeat(np.arange(len(event.workers)), event.row_counts)[at]
                ended = event.finished[at] != FinishReason.RUNNING
                for report in np.unique(of_row[ended]).tolist():
                    over = ended & (of_row == report)
                    self._end(
                        self._batches[step], event.workers[report], rows[at][over], event.finished[at][over],
                        event.assignments[at][over], outcome,
                    )  # fmt: skip

    def _write(
        self, batch: StepBatch, rows: np.ndarray, offsets: np.ndarray, counts: np.ndarray, versions: np.ndarray | int,
        tokens: np.ndarray, logprobs: np.ndarray, routes: np.ndarray | None, outcome: Outcome,
    ) -> None:  # fmt: skip
        batch.put(rows, offsets, counts, tokens, logprobs, versions, routes)
        batch.length[rows] = offsets + counts  # numpy keeps the last entry of a row that comes twice
        batch.state[rows[counts > 0]] = SampleState.STREAMING
        outcome.tokens += len(tokens)
        if is_evaluation(batch.step):
            self._counters.evaluation_tokens += len(tokens)
        else:
            self._counters.tokens += len(tokens)

    def _end(
        self, batch: StepBatch, worker: str, rows: np.ndarray, finished: np.ndarray, assignments: np.ndarray,
        outcome: Outcome,
    ) -> None:  # fmt: skip
        """End these hand-outs, each for the reason in ``finished``."""
        self._slots.end(assignments)
        done = finished != FinishReason.ABORTED
        finish(batch, rows[done], finished[done], outcome)
        give_back(batch, rows[~done], outcome)
        outcome.count_ended(worker, len(rows))

    # ------------------------------------------------------------ where something is wrong

    def _judge(self, report: TokensAppended, outcome: Outcome) -> None:
        """Enter what fits of a single report, and count the rest."""
        [worker] = report.workers
        for pick in _passes(report.assignments):
            steps, rows = self._slots.find(report.assignments, self._workers.get(worker, -1))
            known = pick & (rows >= 0)
            unknown = pick & (rows < 0)
            self._counters.unknown_rows += int(np.count_nonzero(unknown))
            outcome.note_broken(worker, report.assignments[unknown & (report.finished == FinishReason.RUNNING)])
            for step in distinct(steps[known]):
                good = self._good(report, step, rows, known & (steps == step), outcome)
                self._enter(report, steps, rows, good, outcome)

    def _good(
        self, report: TokensAppended, step: int, rows: np.ndarray, pick: np.ndarray, outcome: Outcome
    ) -> np.ndarray:
        """bool[n] which rows of ``pick``, all of them of ``step``, enter; the others are counted."""
        batch = self._batches[step]
        picked = np.where(pick, rows, 0)
        ends = batch.length[picked]
        duplicate = pick & (report.offsets < ends)
        fits = report.offsets + report.counts <= batch.limits(picked)
        gap = pick & ~duplicate & ((report.offsets > ends) | ~fits | (report.finished > FinishReason.ABORTED))
        self._counters.duplicate_rows += int(np.count_nonzero(duplicate))
        self._counters.gap_rows += int(np.count_nonzero(gap))
        overlap = duplicate & (report.offsets + report.counts > ends)
        outcome.note_broken(report.workers[0], report.assignments[gap | overlap])
        return pick & ~duplicate & ~gap


def _check_columns(event: TokensAppended) -> None:
    n, total = len(event.assignments), len(event.tokens)
    reports_fit = len(event.workers) == len(event.versions) == len(event.row_counts)
    if not reports_fit or event.row_counts.sum() != n or (event.row_counts < 0).any():
        raise IllegalTransition(f"reports of {_who(event)} have {n} rows, not those that they are said to have")
    columns = (event.offsets, event.counts, event.finished)
    if any(len(c) != n for c in columns) or (event.counts < 0).any() or event.counts.sum() != total:
        raise IllegalTransition(f"a report of {_who(event)} has columns that do not fit each other")
    if min(event.versions.tolist(), default=0) < 0:  # from a worker that hands back before its first version
        _check_marks(event)
    if len(event.logprobs) != total:
        raise IllegalTransition(f"a report of {_who(event)} has {total} tokens and {len(event.logprobs)} logprobs")
    if (routes := event.routes) is not None and (routes.ndim != 2 or len(routes) != total or routes.dtype != np.uint8):
        raise IllegalTransition(f"a report of {_who(event)} has {total} tokens and routes {routes.dtype}{routes.shape}")


def _check_marks(event: TokensAppended) -> None:
    """Raise IllegalTransition if tokens come without a version, by which they are told from an environment's."""
    if event.counts[np.repeat(event.versions < 0, event.row_counts)].any():
        raise IllegalTransition(f"a report of {_who(event)} has tokens of version {event.versions.min()}")


def _who(event: TokensAppended) -> str:
    return ", ".join(sorted(set(event.workers)))


def _version_of_rows(event: TokensAppended) -> np.ndarray | int:
    """int32[n] version of each row, or one for all, which is the usual case."""
    versions = event.versions
    if (versions == versions[0]).all():
        return int(versions[0])
    return np.repeat(versions, event.row_counts)


def _passes(assignments: np.ndarray) -> Iterator[np.ndarray]:
    """Masks of the rows to judge together: all, or one by one if an assignment comes twice in a report."""
    n = len(assignments)
    ordered = np.sort(assignments)
    if (ordered[1:] == ordered[:-1]).any():
        for row in range(n):
            mask = np.zeros(n, np.bool_)
            mask[row] = True
            yield mask
    else:
        yield np.ones(n, np.bool_)
