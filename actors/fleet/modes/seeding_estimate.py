"""Estimates whether the trainer would have to wait, in a live job (``scheduling.seeding_end: estimated``).

    ledger, length ranking, latency tables, the trainer's pace ─▶ HandOverView ─▶ policies.hand_over ─▶ the window ends
    step committed ─▶ seconds per token that its training took

Invariants
- Nothing is guessed: there is no answer before a step has been trained in this life of the scheduler, nor without a
  remote worker whose latency was measured, nor while fewer than half of the prompts have an expected length.
- An estimate is only advice: a wrong one costs a wait and never a sample. All of it may be lost.
- While a step lacks many samples, every k-th missing group stands for all, so that an estimate costs no more than one
  over ``_LOOKED_AT`` samples; once fewer are missing, all are counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from actors.fleet.length_ranking import LengthRanking
from actors.fleet.workers import Worker
from actors.ledger.batch import SampleState, StepBatch
from actors.ledger.ledger import Ledger
from actors.policies.assigning.latency_table import LatencyTable
from actors.policies.seeding import hand_over
from actors.policies.seeding.hand_over import HandOverView, Left

S = SampleState
KNOWN_MIN = 0.5
"""Fraction of the prompts that must have an expected length."""
_LOOKED_AT = 2048
"""Number of a step's samples that an estimate examines, unless one group has more."""
_TABLES = 4
"""Number of workers' latency tables whose mean stands for all workers."""


class _Look(NamedTuple):
    step: int
    at_s: float
    enough: bool | None
    """Whether the trainer would not wait; None: too little was known."""


_NO_LOOK = _Look(-1, 0.0, None)


@dataclass(frozen=True, slots=True)
class _MeanPace:
    """The pace is the mean over workers, which may be of several kinds."""

    tables: Sequence[LatencyTable]

    def step_s(self, batch: float, context_tokens: float) -> float:
        return sum(table.step_s(batch, context_tokens) for table in self.tables) / len(self.tables)


@dataclass(slots=True)
class SeedingEstimate:
    """The estimate says how long the trainer would wait, from what this life of the scheduler has seen."""

    ledger: Ledger
    ranking: LengthRanking
    look_every_s: float
    train_token_s: float = 0.0
    """Training seconds per response token, in the step that was trained last."""
    max_staleness: int = 0
    """How many steps ahead of the trained one may be generated."""
    _looked: _Look = _NO_LOOK
    _busy_until_s: float = 0.0
    """Time until which the trainer is probably busy with groups that it already has of its open step."""

    def would_not_wait(self, batch: StepBatch, remote: Sequence[Worker], now: float) -> bool | None:
        """Whether the trainer, handed ``batch`` now, would find its groups in time; None: too little is known."""
        if batch.step != self._looked.step or now - self._looked.at_s >= self.look_every_s:
            view = self._view(batch, remote, now)
            enough = None if view is None else hand_over.should_train(view)
            self._looked = _Look(batch.step, now, enough)
        return self._looked.enough

    def ran_dry(self, batch: StepBatch, remote: Sequence[Worker], local: int, switch_s: float, now: float) -> bool:
        """Whether the trainer waits for ``batch`` so long that its own engines should generate; False if unknown.

        ``local``: number of these engines. ``switch_s``: seconds that one needs to fall asleep, or to wake.
        """
        if now < self._busy_until_s + switch_s:  # a mean: the last micro-batch may take longer
            return False
        view = self._view(batch, remote, now, helpers=local)
        return view is not None and hand_over.should_return(view, switch_s=switch_s)

    def opened(self) -> None:
        """Note that the trainer has opened a step, so that it is not busy with groups of an earlier one."""
        self._busy_until_s = 0.0

    def given(self, tokens: int, now: float) -> None:
        """Note how many response tokens the trainer has been given."""
        self._busy_until_s = max(self._busy_until_s, now) + tokens * self.train_token_s

    def _busy_s(self, now: float) -> float:
        return max(0.0, self._busy_until_s - now)

    def committed(self, batch: StepBatch, train_s: float) -> None:
        """Note that training ``batch`` took ``train_s``, without waiting."""
        tokens = int(batch.length[batch.state == S.COMMITTED].sum())
        if train_s > 0 and tokens:
            self.train_token_s = train_s / tokens

    # ------------------------------------------------------------ the view

    def _view(self, batch: StepBatch, remote: Sequence[Worker], now: float, *, helpers: int = 0) -> HandOverView | None:
        tables = [table for worker in remote if not (table := worker.latency.table).empty]
        expected = self._expected(batch)
        if not tables or not self.train_token_s or expected is None:
            return None
        missing = np.flatnonzero(~_complete(batch))
        k = _thinned(len(missing), batch.group_size)
        missing = missing[::k]
        rows = _unfinished(batch, missing)
        left = _left(batch, rows, expected)
        begun, others = self._by_place(batch, rows, left, remote)
        running, queued = _lefts(batch, begun, left), _lefts(batch, others, left)
        runs = sum(worker.runs for worker in remote)
        queued[:0] = running[round(runs / k) :]  # an engine holds more than it runs: those that wait there begin first
        running = running[: round(runs / k)] + self._of_other_steps(batch, remote, k)
        group_s = self.train_token_s * _by_group(batch, batch.length + left)
        return HandOverView(
            ready_s=self._busy_s(now) + float(group_s[_to_grant(batch)].sum()),
            running=running,
            queued=queued,
            train_s={i: k * float(group_s[i]) for i in missing.tolist()},
            workers=len(remote) / k,
            more_waits=self._more_waits(batch),
            helpers=helpers / k,
            places=runs / len(remote),
            cache_tokens=math.inf,
            pace=_MeanPace(tables[:: math.ceil(len(tables) / _TABLES)]),
        )

    def _expected(self, batch: StepBatch) -> np.ndarray | None:
        """float64[groups] expected tokens of a response, or the median if unknown; None if too few are known."""
        expected = self.ranking.expected(batch, np.arange(len(batch.prompts)))
        known = np.isfinite(expected)
        return np.where(known, expected, np.median(expected[known])) if known.mean() >= KNOWN_MIN else None

    def _by_place(
        self, batch: StepBatch, rows: np.ndarray, left: np.ndarray, remote: Sequence[Worker]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows that remote workers hold, running ones first; and all others, in the order of their hand-out."""
        there = self._held_by(remote, batch, rows)
        begun, others = rows[there], rows[~there]
        moved = (batch.length[others] > 0) | (batch.attempts[others] > 0)
        return (
            begun[np.argsort(batch.state[begun] == S.ASSIGNED, kind="stable")],
            others[np.lexsort((-left[others], ~moved))],
        )

    def _of_other_steps(self, batch: StepBatch, remote: Sequence[Worker], k: int) -> list[Left]:
        """Samples of later steps that remote workers hold, which take time on these workers as well."""
        found: list[Left] = []
        for other in self.ledger.batches.values():
            if other is not batch and not other.committed and (expected := self._expected(other)) is not None:
                rows = _unfinished(other, np.flatnonzero(~_complete(other))[::k])
                rows = rows[self._held_by(remote, other, rows)]
                found += [one._replace(group=-1) for one in _lefts(other, rows, _left(other, rows, expected))]
        return found

    def _more_waits(self, batch: StepBatch) -> bool:
        """Whether samples of later steps are queued, so that free workers would begin those."""
        later = [other for other in self.ledger.batches.values() if 0 < other.step - batch.step <= self.max_staleness]
        return any(bool((other.state == S.QUEUED).any()) for other in later)

    def _held_by(self, remote: Sequence[Worker], batch: StepBatch, rows: np.ndarray) -> np.ndarray:
        """bool[n]: a remote worker holds the row."""
        in_flight = batch.state[rows] != S.QUEUED
        held = np.zeros(len(rows), np.bool_)
        names = [worker.name for worker in remote]
        held[in_flight] = self.ledger.held_by(names, batch.assignment[rows[in_flight]]) >= 0
        return held


def _thinned(groups: int, group_size: int) -> int:
    """The k for which every k-th of ``groups`` missing groups is examined; 1 for few, so that a step's tail counts."""
    return max(1, min(groups, math.ceil(groups * group_size / _LOOKED_AT)))


def _unfinished(batch: StepBatch, groups: np.ndarray) -> np.ndarray:
    """Rows of ``groups`` that are not fully generated."""
    rows = (groups[:, None] * batch.group_size + np.arange(batch.group_size)).reshape(-1)
    return rows[batch.state[rows] < S.FINISHED]


def _complete(batch: StepBatch) -> np.ndarray:
    """bool[groups]: every sibling has its reward, or is dropped."""
    return np.logical_and.reduce((batch.state >= S.SCORED).reshape(-1, batch.group_size), axis=1)


def _to_grant(batch: StepBatch) -> np.ndarray:
    """bool[groups]: the group is complete, and the trainer has not been given it."""
    return _complete(batch) & (batch.state == S.SCORED).reshape(-1, batch.group_size).any(axis=1)


def _by_group(batch: StepBatch, tokens: np.ndarray) -> np.ndarray:
    """float64[groups] sums of ``tokens`` over the samples that are not dropped."""
    return (tokens * (batch.state != S.DROPPED)).reshape(-1, batch.group_size).sum(axis=1)


def _left(batch: StepBatch, rows: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """float64[samples of the batch] tokens that ``rows`` still need; 0 for other rows."""
    left, longest = np.zeros(len(batch)), batch.sampling.max_tokens
    pairs = zip(expected[rows // batch.group_size].tolist(), batch.length[rows].tolist(), strict=True)
    left[rows] = [hand_over.left_tokens(tokens, has, longest) for tokens, has in pairs]
    return left


def _lefts(batch: StepBatch, rows: np.ndarray, left: np.ndarray) -> list[Left]:
    groups = (rows // batch.group_size).tolist()
    has, needs = batch.length[rows].tolist(), left[rows].tolist()
    prompts = [len(batch.prompt_ids[group]) for group in groups]
    parts = zip(groups, prompts, has, needs, strict=True)
    return [Left(tokens, group, prompt + begun + tokens / 2) for group, prompt, begun, tokens in parts]
