"""Cuts of a planned step in a live job: a worker that is nearly done hands its rest to others, and can sleep.

    worker table, parts, expected lengths ─▶ CutView ─▶ policies.cut.decide ─▶ Cut(source, target, count)
    all cuts of a source ─▶ its rows get the targets as owners; what runs is revoked ─▶ moves.order ─▶ policies.assign

Invariants, besides those of ``moves.py``
- A source hands over everything or nothing, so that it can sleep; the worker with the longest part never does.
- A sample that has been handed out ``balance_moves_max`` times does not move again, so its worker is not cut.
- A cut is a preference, like all of the plan: if a target is gone before it has the samples, any worker takes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

from actors.fleet.length_ranking import LengthRanking
from actors.fleet.modes.moves import Moves
from actors.fleet.modes.step_parts import StepParts
from actors.fleet.scope import JobScope
from actors.fleet.workers import Worker
from actors.ledger.batch import SampleState, StepBatch
from actors.policies.planning import cut
from actors.policies.planning.cut import CutView, CutWorker


class Cuts:
    """The cuts of a job's steps are decided here; ``look`` may be called at any time."""

    def __init__(self, scope: JobScope, ranking: LengthRanking, transfer_s: Mapping[str, float]) -> None:
        """``transfer_s``: as in ``StepPlanner``."""
        self._scope = scope
        self._ranking = ranking
        self._transfer_s = transfer_s
        self._moves = Moves(scope)
        self._cut_at = scope.job.scheduling.plan.cut_at
        self._looked_at_s = float("-inf")

    def coming(self) -> set[str]:
        """Workers for which samples are on their way."""
        self._moves.forget_what_has_left()
        return {name for name, held in self._moves.held().items() if held > self._in_flight(name)}

    def _in_flight(self, name: str) -> int:
        worker = self._scope.workers.by_name.get(name)
        return 0 if worker is None else worker.in_flight

    def look(self, batch: StepBatch, parts: StepParts, longest: str | None, now: float) -> dict[str, int]:
        """Order the cuts that the policy asks for, at most once in ``balance_interval_s``; source → its samples."""
        if self._cut_at >= 1.0 or now - self._looked_at_s < self._scope.limits.balance_interval_s:
            return {}
        self._looked_at_s = now
        self._moves.forget_what_has_left()
        self._follow(batch, parts)
        serving = [worker for worker in self._moves.serving(now) if worker.policy_version >= batch.step]
        if len(serving) < 2:
            return {}
        view = self._view(batch, parts, serving, longest)
        cuts = cut.decide(CutView(view, self._cut_at), now)
        by_source = itertools.groupby(sorted(cuts), lambda one: one.source)
        return {source: n for source, of_it in by_source if (n := self._cut(batch, parts, source, list(of_it)))}

    def _follow(self, batch: StepBatch, parts: StepParts) -> None:
        """Samples of a worker that is gone, which others have taken, become parts of those that hold them now."""
        ledger, told = self._scope.ledger, self._moves.told()
        for worker in self._scope.workers.by_name.values():
            numbers = ledger.in_flight(worker.name)
            if gone := told.get(worker.name):
                numbers = numbers[np.isin(numbers, np.concatenate(gone), invert=True)]
            rows = ledger.located(worker.name, numbers).get(batch.step)
            if rows is not None:
                parts.give(rows, worker.name)

    def _view(self, batch: StepBatch, parts: StepParts, serving: list[Worker], longest: str | None) -> list[CutWorker]:
        held, told = self._moves.held(), self._moves.told()
        found: list[CutWorker] = []
        for worker in serving:
            rows = parts.rows(worker.name)
            state = batch.state[rows]
            left = rows[state < SampleState.FINISHED]
            queued = int((state == SampleState.QUEUED).sum())
            moves = (batch.attempts[left] < self._scope.limits.balance_moves_max) & (worker.name not in told)
            rest = self._ranking.left(batch, left).max() if len(left) else 0
            found.append(
                CutWorker(
                    worker.name,
                    assigned=len(rows),
                    done=len(rows) - len(left),
                    free=max(0, worker.runs - held[worker.name] - queued),
                    movable=int(moves.sum()),
                    rest_tokens=float(rest),
                    distance_s=self._transfer_s.get(worker.name, 0.0),
                )
            )
        names = {one.name for one in found}
        if longest not in names:  # gone: take the worker with the most left
            longest = max(found, key=lambda one: one.rest_tokens).name
        return [one._replace(holds_longest=one.name == longest) for one in found]

    def _cut(self, batch: StepBatch, parts: StepParts, source: str, cuts: list[cut.Cut]) -> int:
        """Move all samples that the source has left, siblings together; returns how many, 0 if it has to keep some."""
        scope, at = self._scope, 0
        rows = parts.rows(source)
        rows = rows[batch.state[rows] < SampleState.FINISHED]
        held = np.isin(batch.assignment[rows], scope.ledger.in_flight(source))
        if sum(one.samples for one in cuts) != len(rows):
            return 0
        for one in cuts:
            of_it = slice(at, at + one.samples)
            numbers = batch.assignment[rows[of_it][held[of_it]]]
            if len(numbers) and not self._moves.order(source, one.target, numbers):
                return 0
            parts.give(rows[of_it], one.target)
            scope.record("samples_cut", step=batch.step, worker=source, target=one.target, samples=one.samples)
            at += one.samples
        return at
