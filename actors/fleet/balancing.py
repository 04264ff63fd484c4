"""Continuous balancing in a live job: samples leave workers that have too many for those that have too few.

    worker table, latency tables ─▶ QueueView ─▶ policies.balance.decide ─▶ Move(source, target, count)
    nothing to move, somebody idle: scheduling.relief ─▶ policies.relieve.decide ─▶ Move of the oldest step's samples
    Move ─▶ which samples ─▶ moves.order ─▶ queued again, with their tokens ─▶ policies.assign: the shortest queue

Invariants, besides those of ``moves.py``
- Nothing is moved for ever: a sample that has been handed out ``balance_moves_max`` times stays where it is.
- Suspects stay where they are, and so do the samples of steps for which workers are dedicated: there the lanes say who
  generates what.
- Where a sample goes in the end is the assignment policy's choice, so all of its rules hold for what is moved too.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.fleet.long_lanes import LongLanes
from actors.fleet.moves import Moves
from actors.fleet.scope import JobScope
from actors.fleet.workers import Worker
from actors.ledger.batch import SampleState, StepBatch
from actors.policies import balance, relieve
from actors.policies.balance import Move, QueueView
from actors.policies.relieve import Running

_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class _Movable:
    """These samples are with workers and may be taken from them; a column each, int[n]."""

    numbers: np.ndarray
    """Assignments."""
    steps: np.ndarray
    tokens: np.ndarray
    at: np.ndarray
    """Position of the sample's worker among those that were asked for."""


class Balancing:
    """It moves samples between the workers of a job. ``look`` as often as you like."""

    def __init__(self, scope: JobScope, lanes: LongLanes, *, relief: bool = False) -> None:
        """``relief``: as ``scheduling.relief``."""
        self._scope = scope
        self._relief = relief
        self._lanes = lanes
        self._moves = Moves(scope)
        self._looked_at_s = float("-inf")

    def look(self, now: float) -> None:
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
        """Idle workers take what the oldest step waits for, where that makes it faster.

        Whoever is idle here got nothing from the dispatcher a moment ago: there is nothing left to hand out.
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
        """int64[n] assignments that these run and may lose, what they are, and int32[n] who of the workers has each."""
        found = self._movable(workers, SampleState.STREAMING)
        stays = np.isin(found.numbers, np.concatenate([_NOTHING, *itertools.chain(*told.values())]), invert=True)
        at = found.at[stays]
        return found.numbers[stays], Running(found.steps[stays], found.tokens[stays], at), at

    def _by_source(self, moves: Sequence[Move], *, running: bool) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Who gives such samples → tokens and assignments of all that it may lose, int64[m] each."""
        sources = list(dict.fromkeys(move.source for move in moves if move.running == running))
        found = self._movable(sources, SampleState.STREAMING if running else SampleState.ASSIGNED)
        by_source = np.argsort(found.at, kind="stable")
        ends = np.cumsum(np.bincount(found.at, minlength=len(sources)))[:-1]
        columns = (np.split(column[by_source], ends) for column in (found.tokens, found.numbers))
        return dict(zip(sources, zip(*columns, strict=True), strict=True))

    def _movable(self, workers: list[str], state: SampleState) -> _Movable:
        """What these hold in that state and may lose, looked up for all of them at once: they may be hundreds."""
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
        """Keep the rows that have not been moved too often, of a step for which nobody is dedicated."""
        if self._lanes.dedicated(batch.step):
            return rows[:0]
        return rows[batch.attempts[rows] < self._scope.limits.balance_moves_max]


def _pick(move: Move, movable: tuple[np.ndarray, np.ndarray] | None, told: list[np.ndarray]) -> np.ndarray:
    """int64[<= count]: of those that run, the ones with the fewest tokens; of the pending, the last in line.

    ``movable``: tokens and assignments; ``told``: those that the source has been told to end.
    """
    tokens, numbers = movable or (_NOTHING, _NOTHING)
    if told:
        stays = np.isin(numbers, np.concatenate(told), invert=True)
        tokens, numbers = tokens[stays], numbers[stays]
    order = np.lexsort((numbers, tokens)) if move.running else np.argsort(-numbers)
    return numbers[order[: move.count]]


def _is_faster(source: Worker, held: int, target: Worker, given: int) -> bool:
    """Whether ``given`` samples at ``target`` have shorter decode steps than ``held`` ones at ``source``.

    By the target's own table, since machines differ; by the source's if nobody has measured the target yet.
    """
    context_tokens, table = source.latency.context_tokens, source.latency.table
    there = table if target.latency.table.empty else target.latency.table
    return relieve.pays(table.step_s(held, context_tokens), there.step_s(given, context_tokens))


def _plateau(worker: Worker) -> int | None:
    """The batch beyond which the worker's throughput hardly grows, at the context that its sequences have now."""
    return balance.plateau(worker.latency.table.throughput(worker.latency.context_tokens))
