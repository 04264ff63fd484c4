"""Whether the trainer would have to wait, in a live job (``scheduling.seeding_end: estimated``).

    ledger, length ranking, latency tables, the trainer's pace ─▶ HandOverView ─▶ policies.hand_over ─▶ the window ends
    step committed ─▶ what a token of it took to train

Invariants
- What is not known is not guessed: there is no answer before a step has been trained in this life of the scheduler, nor
  without a measured worker elsewhere, nor while fewer than half of the prompts have an expected length.
- It only advises: whoever asks decides, and a wrong answer costs a wait and never a sample. All of it can be lost.
- Of a step of which much is missing every k-th missing group stands for all, so that a look costs as much as one at
  ``_LOOKED_AT`` samples; once less than that is missing, all of it is looked at.
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
from actors.policies import hand_over
from actors.policies.hand_over import HandOverView, Left
from actors.policies.latency_table import LatencyTable

S = SampleState
KNOWN_MIN = 0.5
"""Part of the prompts that must have an expected length."""
_LOOKED_AT = 2048
"""Number of a step's samples that are looked at, unless one group has more."""
_TABLES = 4
"""Number of latency tables whose mean stands for all."""


class _Look(NamedTuple):
    step: int
    at_s: float
    enough: bool | None
    """Whether the trainer would not wait; None: too little was known."""


_NO_LOOK = _Look(-1, 0.0, None)


@dataclass(frozen=True, slots=True)
class _MeanPace:
    """It is the mean pace of workers that may be of several kinds."""

    tables: Sequence[LatencyTable]

    def step_s(self, batch: float, context_tokens: float) -> float:
        return sum(table.step_s(batch, context_tokens) for table in self.tables) / len(self.tables)


@dataclass(slots=True)
class SeedingEstimate:
    """It estimates how long the trainer would wait, from what this life of the scheduler has seen."""

    ledger: Ledger
    ranking: LengthRanking
    look_every_s: float
    train_token_s: float = 0.0
    """Seconds a response token took to train, in the step that was trained last."""
    max_staleness: int = 0
    """Steps ahead of the trained one that may be generated."""
    _looked: _Look = _NO_LOOK
    _busy_until_s: float = 0.0
    """Time until which the trainer probably trains what it has been given of the step that it has open."""

    def would_not_wait(self, batch: StepBatch, remote: Sequence[Worker], now: float) -> bool | None:
        """Whether the trainer, handed ``batch`` now, would find its groups in time; None: too little is known."""
        if batch.step != self._looked.step or now - self._looked.at_s >= self.look_every_s:
            view = self._view(batch, remote, now)
            enough = None if view is None else hand_over.should_train(view)
            self._looked = _Look(batch.step, now, enough)
        return self._looked.enough

    def ran_dry(self, batch: StepBatch, remote: Sequence[Worker], local: int, switch_s: float, now: float) -> bool:
        """Whether the trainer waits for ``batch`` so long that its own engines had better generate; False: not known.

        ``local``: so many workers would. ``switch_s``: what it takes one of them to fall asleep, or to wake.
        """
        if self._busy_s(now) > 0:
            return False
        view = self._view(batch, remote, now, helpers=local)
        return view is not None and hand_over.should_return(view, switch_s=switch_s)

    def opened(self) -> None:
        """Note that the trainer begins with a step: it no longer has what it was given before."""
        self._busy_until_s = 0.0

    def given(self, tokens: int, now: float) -> None:
        """Note how many response tokens the trainer has been given."""
        self._busy_until_s = max(self._busy_until_s, now) + tokens * self.train_token_s

    def _busy_s(self, now: float) -> float:
        return max(0.0, self._busy_until_s - now)

    def committed(self, batch: StepBatch, train_s: float) -> None:
        """``batch`` is trained, which took ``train_s`` without waiting."""
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
        queued[:0] = running[round(runs / k) :]  # an engine holds more than it runs: what waits there begins first
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
        """float64[groups] of a response; None if too few prompts are known. What nobody knows counts as the median."""
        expected = self.ranking.expected(batch, np.arange(len(batch.prompts)))
        known = np.isfinite(expected)
        return np.where(known, expected, np.median(expected[known])) if known.mean() >= KNOWN_MIN else None

    def _by_place(
        self, batch: StepBatch, rows: np.ndarray, left: np.ndarray, remote: Sequence[Worker]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows that remote workers hold, begun ones first; all others in the order in which they will go."""
        there = self._held_by(remote, batch, rows)
        begun, others = rows[there], rows[~there]
        moved = (batch.length[others] > 0) | (batch.attempts[others] > 0)
        return (
            begun[np.argsort(batch.state[begun] == S.ASSIGNED, kind="stable")],
            others[np.lexsort((-left[others], ~moved))],
        )

    def _of_other_steps(self, batch: StepBatch, remote: Sequence[Worker], k: int) -> list[Left]:
        """What remote workers hold of steps that are trained later: it takes their time all the same."""
        found: list[Left] = []
        for other in self.ledger.batches.values():
            if other is not batch and not other.committed and (expected := self._expected(other)) is not None:
                rows = _unfinished(other, np.flatnonzero(~_complete(other))[::k])
                rows = rows[self._held_by(remote, other, rows)]
                found += [one._replace(group=-1) for one in _lefts(other, rows, _left(other, rows, expected))]
        return found

    def _more_waits(self, batch: StepBatch) -> bool:
        """Somebody could begin samples of later steps now."""
        later = [other for other in self.ledger.batches.values() if 0 < other.step - batch.step <= self.max_staleness]
        return any(bool((other.state == S.QUEUED).any()) for other in later)

    def _held_by(self, remote: Sequence[Worker], batch: StepBatch, rows: np.ndarray) -> np.ndarray:
        """bool[n]: a remote worker has it."""
        in_flight = batch.state[rows] != S.QUEUED
        held = np.zeros(len(rows), np.bool_)
        names = [worker.name for worker in remote]
        held[in_flight] = self.ledger.held_by(names, batch.assignment[rows[in_flight]]) >= 0
        return held


def _thinned(groups: int, group_size: int) -> int:
    """Every how manyth of so many groups is looked at: of few all are, so that a step's tail is not overlooked."""
    return max(1, min(groups, math.ceil(groups * group_size / _LOOKED_AT)))


def _unfinished(batch: StepBatch, groups: np.ndarray) -> np.ndarray:
    """Rows of these groups that are not generated."""
    rows = (groups[:, None] * batch.group_size + np.arange(batch.group_size)).reshape(-1)
    return rows[batch.state[rows] < S.FINISHED]


def _complete(batch: StepBatch) -> np.ndarray:
    """bool[groups]: every sibling has its reward, or is dropped."""
    return np.logical_and.reduce((batch.state >= S.SCORED).reshape(-1, batch.group_size), axis=1)


def _to_grant(batch: StepBatch) -> np.ndarray:
    """bool[groups]: complete, and the trainer has not been given it."""
    return _complete(batch) & (batch.state == S.SCORED).reshape(-1, batch.group_size).any(axis=1)


def _by_group(batch: StepBatch, tokens: np.ndarray) -> np.ndarray:
    """float64[groups] sums over the samples that are not dropped."""
    return (tokens * (batch.state != S.DROPPED)).reshape(-1, batch.group_size).sum(axis=1)


def _left(batch: StepBatch, rows: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """float64[samples of the batch] tokens that ``rows`` still need, 0 of the others."""
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
