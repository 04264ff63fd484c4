"""Continuous balancing in a live job: samples leave workers that have too many for those that have too few.

    worker table, latency tables ─▶ QueueView ─▶ policies.balance.decide ─▶ Move(source, target, count)
    no moves, but idle workers: scheduling.relief ─▶ policies.relieve.decide ─▶ Moves of the oldest step's samples
    Move ─▶ which samples ─▶ moves.order ─▶ queued again, with their tokens ─▶ policies.assign: the shortest queue

Invariants, besides those of ``moves.py``
- No sample is moved for ever: one that has been handed out ``balance_moves_max`` times stays where it is.
- Suspects stay where they are, and so do the samples of steps for which workers are dedicated: there ``long_lanes``
  says which worker generates what.
- The assignment policy chooses where a sample really goes, so all of its rules hold for moved samples as well.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.fleet.length_ranking import LengthRanking
from actors.fleet.modes.moves import Moves
from actors.fleet.modes.plain import Plain
from actors.fleet.scope import JobScope
from actors.fleet.versions import Versions
from actors.fleet.workers import Worker
from actors.ledger.batch import SampleState, StepBatch
from actors.policies.assigning import balance, relieve
from actors.policies.assigning.balance import Move, QueueView
from actors.policies.assigning.relieve import Running

_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class _Movable:
    """Samples that workers hold and may lose are listed here, one int[n] array per column."""

    numbers: np.ndarray
    """Assignments."""
    steps: np.ndarray
    tokens: np.ndarray
    at: np.ndarray
    """Index of the sample's worker in the list that was asked for."""


class Balanced(Plain):
    """Samples move from workers that have too many to those that have too few."""

    def __init__(self, scope: JobScope, versions: Versions, ranking: LengthRanking) -> None:
        super().__init__(scope, versions, ranking)
        self.pending_max = scope.limits.pending_samples_max
        self._relief = scope.job.scheduling.relief
        self._moves = Moves(scope)
        self._looked_at_s = float("-inf")

    def handed_out(self, now: float) -> None:
        """Order the moves that the policy asks for, at most once in ``balance_interval_s``."""
        if now - self._looked_at_s < self._scope.limits.balance_interval_s:
            return
        self._looked_at_s = now
        self._moves.forget_what_has_left()
        workers = self._moves.serving(now)
        if len(workers) > 1:
            held, told = self._moves.held(), self._moves.told()
            moves = balance.decide(self._queues(workers, held))
            held_by = {running: self._by_source(moves, running=running) for running in {move.running for move in moves}}
            for move in moves:
                numbers = _pick(move, held_by[move.running].get(move.source), told.get(move.source, []))
                if len(numbers):
                    told.setdefault(move.source, []).append(numbers)
                    self._order(move, numbers)
            if self._relief and not moves:
                self._relieve(workers, held, told)

    def _queues(self, workers: list[Worker], held: dict[str, int]) -> list[QueueView]:
        some_idle = not all(held[worker.name] for worker in workers)
        none_pending = all(held[worker.name] <= worker.runs for worker in workers)
        running_may_move = some_idle and none_pending  # the plateau is asked for then, and only then
        return [
            QueueView(
                worker.name,
                pending=max(0, held[worker.name] - worker.runs),
                executing=min(held[worker.name], worker.runs),
                slots=worker.runs,
                plateau=_plateau(worker) if running_may_move and held[worker.name] else None,
            )
            for worker in workers
        ]

    def _relieve(self, workers: list[Worker], held: dict[str, int], told: dict[str, list[np.ndarray]]) -> None:
        """Move samples of the oldest step to idle workers, where that makes them faster.

        A worker that is idle here got nothing from the dispatcher just before, so nothing is left to hand out.
        """
        idle = [worker for worker in workers if not held[worker.name]]
        busy = [worker for worker in workers if held[worker.name]]
        if not idle or not busy or any(held[worker.name] > worker.runs for worker in busy):
            return
        numbers, running, at = self._running([worker.name for worker in busy], told)
        moving = relieve.decide(running, len(idle), len(workers))
        dealt = relieve.orders(at[moving], len(idle))
        given = Counter[int]()
        for _, target, which in dealt:
            given[target] += len(which)
        for source, target, which in dealt:
            if _is_faster(busy[source], held[busy[source].name], idle[target], given[target]):
                order = Move(busy[source].name, idle[target].name, len(which), running=True)
                self._order(order, np.sort(numbers[moving[which]]), relief=True)

    def _running(self, workers: list[str], told: dict[str, list[np.ndarray]]) -> tuple[np.ndarray, Running, np.ndarray]:
        """What ``workers`` run and may lose: int64[n] assignments, the policy's view, int32[n] worker indices."""
        found = self._movable(workers, SampleState.STREAMING)
        stays = np.isin(found.numbers, np.concatenate([_NOTHING, *itertools.chain(*told.values())]), invert=True)
        at = found.at[stays]
        return found.numbers[stays], Running(found.steps[stays], found.tokens[stays], at), at

    def _by_source(self, moves: Sequence[Move], *, running: bool) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Source of each such move → tokens and assignments of the samples that it may lose, int64[m] each."""
        sources = list(dict.fromkeys(move.source for move in moves if move.running == running))
        found = self._movable(sources, SampleState.STREAMING if running else SampleState.ASSIGNED)
        by_source = np.argsort(found.at, kind="stable")
        ends = np.cumsum(np.bincount(found.at, minlength=len(sources)))[:-1]
        columns = (np.split(column[by_source], ends) for column in (found.tokens, found.numbers))
        return dict(zip(sources, zip(*columns, strict=True), strict=True))

    def _movable(self, workers: list[str], state: SampleState) -> _Movable:
        """Samples in ``state`` that ``workers`` may lose, looked up at once, since there may be hundreds of workers."""
        ledger = self._scope.ledger
        parts: list[tuple[np.ndarray, ...]] = [(_NOTHING,) * 4]
        for step, batch in ledger.batches.items():
            rows = self._may_move(batch, np.flatnonzero(batch.state == state))
            at = ledger.held_by(workers, batch.assignment[rows])
            rows, at = rows[at >= 0], at[at >= 0]
            parts.append((batch.assignment[rows], np.full(len(rows), step), batch.length[rows], at))
        return _Movable(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    # ------------------------------------------------------------ acts

    def _order(self, move: Move, numbers: np.ndarray, *, relief: bool = False) -> None:
        if self._moves.order(move.source, move.target, numbers):
            fields = {"samples": len(numbers), "running": int(move.running), "relief": int(relief)}
            self._scope.record("samples_balanced", worker=move.source, target=move.target, **fields)

    def _may_move(self, batch: StepBatch, rows: np.ndarray) -> np.ndarray:
        """The rows that may still be moved: not handed out too often, in a step without dedicated workers."""
        if self._lanes.dedicated(batch.step):
            return rows[:0]
        return rows[batch.attempts[rows] < self._scope.limits.balance_moves_max]


def _pick(move: Move, movable: tuple[np.ndarray, np.ndarray] | None, told: list[np.ndarray]) -> np.ndarray:
    """int64[<= count] assignments to move: running samples with the fewest tokens, or the newest of the waiting.

    ``movable``: tokens and assignments; ``told``: assignments that the source has already been told to end.
    """
    tokens, numbers = movable or (_NOTHING, _NOTHING)
    if told:
        stays = np.isin(numbers, np.concatenate(told), invert=True)
        tokens, numbers = tokens[stays], numbers[stays]
    order = np.lexsort((numbers, tokens)) if move.running else np.argsort(-numbers)
    return numbers[order[: move.count]]


def _is_faster(source: Worker, held: int, target: Worker, given: int) -> bool:
    """Whether ``given`` samples at ``target`` have shorter decode steps than ``held`` ones at ``source``.

    The target is judged by its own latency table, since machines differ, or by the source's if it has none yet.
    """
    context_tokens, table = source.latency.context_tokens, source.latency.table
    there = table if target.latency.table.empty else target.latency.table
    return relieve.pays(table.step_s(held, context_tokens), there.step_s(given, context_tokens))


def _plateau(worker: Worker) -> int | None:
    """The batch size beyond which the worker's throughput hardly grows, at the present context length."""
    return balance.plateau(worker.latency.table.throughput(worker.latency.context_tokens))
