"""The state of the ledger, and the questions that it answers. Only ``ledger.py`` changes it.

Invariants
- A worker has a number from its first hand-out on; hand-outs are told apart by ``Slots``.
- No answer includes a hand-out that is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from actors.ledger.batch import SampleState, StepBatch
from actors.ledger.errors import IllegalTransition
from actors.ledger.events import TokensAppended, WindowLearned
from actors.ledger.outcome import Counters
from actors.ledger.slots import Slots
from actors.protocol.evaluations import is_evaluation

S = SampleState
NO_STEP: Final = -(1 << 31)
"""Stands for the step of a hand-out that is over."""


class LedgerState:
    """Holds the state of all samples, and answers questions about it. Events of steps below ``floor`` were pruned."""

    def __init__(self, floor: int = 0) -> None:
        self.floor = floor
        self.term = 0
        self.batches: dict[int, StepBatch] = {}
        self.committed_steps = 0
        """Number of committed steps, which are 0 … committed_steps - 1."""
        self.trainer_step = 0
        """Step that the trainer commits next; below ``committed_steps`` while it replays."""
        self.checkpoints: list[tuple[int, str]] = []
        self.paused = False
        """Whether nothing is to be handed out."""
        self.stopping = False
        """Whether the next commit is the last one."""
        self.ended = False
        """Whether the newest checkpoint is the last one."""
        self.window: WindowLearned | None = None
        """Learned seeding window, in a job that has one."""
        self.evaluated: dict[int, dict[str, float]] = {}
        """Figures of each version that has been evaluated; empty if its prompts could not be read."""
        self.counters = Counters()
        self._slots = Slots()
        self._workers: dict[str, int] = {}

    @property
    def next_assignment(self) -> int:
        return self._slots.next

    @property
    def issued_steps(self) -> int:
        """One past the newest step whose batch has been issued."""
        return max(max(self.batches, default=-1) + 1, self.committed_steps)

    @property
    def evaluations(self) -> list[int]:
        """Steps of the batches that evaluate a version, the oldest version first."""
        return sorted((step for step in self.batches if is_evaluation(step)), reverse=True)

    def in_flight(self, worker: str) -> np.ndarray:
        """int64[n] live assignments of ``worker``."""
        return self._slots.of_worker(self._workers.get(worker, -1))

    def in_flight_from(self, worker: str, step: int) -> np.ndarray:
        """int64[n] live assignments of ``worker`` for ``step`` and later ones."""
        numbers = self.in_flight(worker)
        steps, _ = self._slots.find(numbers, self._workers.get(worker, -1))
        return numbers[steps >= step]

    def workers_with_suspects(self) -> set[str]:
        """Workers that hold a sample which may be what crashes engines."""
        held: set[int] = set()
        for batch in self.batches.values():
            if batch.crashes.any():
                numbers = batch.assignment[(batch.crashes > 0) & (batch.assignment >= 0)]
                held.update(self._slots.workers_of(numbers).tolist())
        return {name for name, index in self._workers.items() if index in held}

    def live(self, worker: str, assignments: np.ndarray) -> np.ndarray:
        """Keep the ``assignments`` that are live with ``worker``."""
        _, rows = self._slots.find(assignments, self._workers.get(worker, -1))
        return assignments[rows >= 0]

    def located(self, worker: str, assignments: np.ndarray) -> dict[int, np.ndarray]:
        """Step → rows of those of ``assignments`` that are live with ``worker``."""
        steps, rows = self._slots.find(assignments, self._workers.get(worker, -1))
        steps, rows = steps[rows >= 0], rows[rows >= 0]
        return {step: rows[steps == step] for step in distinct(steps)}

    def steps_of(self, event: TokensAppended) -> np.ndarray:
        """int32[n] step of each row of ``event``; ``NO_STEP`` where its hand-out is not live with its worker."""
        workers = np.array([self._workers.get(name, -1) for name in event.workers], np.int32)
        steps, rows = self._slots.find(event.assignments, np.repeat(workers, event.row_counts))
        return np.where(rows >= 0, steps, NO_STEP).astype(np.int32)

    def live_among(self, worker: str, rows: dict[int, np.ndarray]) -> np.ndarray:
        """int64[n] live assignments of ``worker`` that are of ``rows``, a dict by step."""
        numbers = self.in_flight(worker)
        steps, held = self._slots.find(numbers, self._workers.get(worker, -1))
        among = np.zeros(len(numbers), np.bool_)
        for step, wanted in rows.items():
            among |= (steps == step) & np.isin(held, wanted)
        return numbers[among]

    def held_by(self, workers: Sequence[str], assignments: np.ndarray) -> np.ndarray:
        """int32[n] position in ``workers`` of the one that holds each of these live assignments; -1: another one."""
        positions = np.full(len(self._workers), -1, np.int32)
        for position, name in enumerate(workers):
            if (index := self._workers.get(name)) is not None:
                positions[index] = position
        return positions[self._slots.workers_of(assignments)]

    def last_worker(self, step: int, row: int) -> str:
        """The worker that had this row last; empty: nobody has had it."""
        number = int(self._batch(step).last_worker[row])
        return "" if number < 0 else list(self._workers)[number]

    def former_holders(self) -> set[str]:
        """Workers to which a former life of the scheduler gave samples that nobody has been given since."""
        held = {int(i) for step, batch in self.batches.items() for i in np.unique(batch.holder[self._former(step)])}
        return {name for name, index in self._workers.items() if index in held}

    def formerly_with(self, workers: set[str], step: int) -> np.ndarray:
        """int32[n] queued rows of ``step`` that a former life of the scheduler gave to one of ``workers``."""
        rows = self._former(step)
        return rows[np.isin(self.batches[step].holder[rows], [self._workers.get(name, -2) for name in workers])]

    def _former(self, step: int) -> np.ndarray:
        batch = self.batches[step]
        return np.nonzero((batch.state == S.QUEUED) & (batch.former >= 0))[0].astype(np.int32)

    def count_states(self) -> dict[str, int]:
        """Samples of training steps by state."""
        counts = np.zeros(len(SampleState), np.int64)
        for batch in (batch for step, batch in self.batches.items() if not is_evaluation(step)):
            counts += np.bincount(batch.state, minlength=len(SampleState))
        return {state.name.lower(): int(counts[state]) for state in SampleState}

    def _batch(self, step: int) -> StepBatch:
        batch = self.batches.get(step)
        if batch is None:
            raise IllegalTransition(f"step {step}: no batch has been issued, or it has been pruned")
        return batch

    def batch_of(self, step: int) -> StepBatch | None:
        """The batch of that step; None where its events have been pruned.

        Raises:
            IllegalTransition: no batch has been issued for it.
        """
        return None if self._pruned(step) else self._batch(step)

    def _pruned(self, step: int) -> bool:
        return step < self.floor and step not in self.batches


def distinct(steps: np.ndarray) -> list[int]:
    """The distinct ``steps``, ascending. Nearly always there is one, so that case is quick."""
    if not len(steps):
        return []
    if (steps == steps[0]).all():
        return [int(steps[0])]
    return np.unique(steps).tolist()
