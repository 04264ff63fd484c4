"""Episodes as the ledger has them: found by name, changed by events, waited for by whoever wants news of one.

Invariants
- An event that ends hand-outs stops them at their workers, too.
- While an episode is live its batch is there, and its row is not committed.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

import numpy as np

from actors.fleet.fleet import Fleet
from actors.fleet.scope import JobScope
from actors.fleet.unexplained import Rows
from actors.ledger import events as ev
from actors.ledger.batch import SampleState, StepBatch
from actors.ledger.errors import IllegalTransition, NotAccepted
from actors.protocol.episodes import EpisodeName
from actors.protocol.evaluations import is_evaluation, name_of_batch, version_of
from actors.scheduler.episode_turns import EpisodeRow

LIVE: Final = "live"


class Key(NamedTuple):
    """It says which episode, whatever the life of its environment."""

    step: int
    prompt: int
    sibling: int

    @classmethod
    def of(cls, name: EpisodeName) -> Key:
        return cls(name.step, name.prompt, name.sibling)


class Place(NamedTuple):
    """It is where an episode is in the ledger."""

    batch: StepBatch
    row: int

    @property
    def key(self) -> Key:
        batch, row = self
        return Key(batch.step, int(batch.prompts[row // batch.group_size]), row % batch.group_size)

    @property
    def name(self) -> EpisodeName:
        """Name of the present life of its environment."""
        return EpisodeName(*self.key, int(self.batch.lives[self.row]))

    @property
    def context(self) -> bytes:
        return self.batch.contexts[self.row // self.batch.group_size]

    @property
    def rows(self) -> np.ndarray:
        """int32[1], for an event about it alone."""
        return np.array([self.row], np.int32)

    @property
    def waits(self) -> bool:
        """Whether it waits for its environment."""
        return bool(self.batch.state[self.row] == SampleState.WAITING)

    def view(self) -> EpisodeRow:
        return EpisodeRow(self.batch, self.row)


class EpisodeRows:
    """The parts of a job's episodes share this for as long as their scheduler lives."""

    def __init__(self, scope: JobScope, fleet: Fleet) -> None:
        self._scope, self._fleet, self._ledger = scope, fleet, scope.ledger
        self._news: dict[Key, asyncio.Event] = {}
        fleet.returns.waiting = self._turns_over

    def find(self, name: EpisodeName) -> Place | str:
        """Where an episode is while this life of its environment is the present one; else its status."""
        batch = self._ledger.batches.get(name.step)
        if batch is None or batch.episodes is None:
            return "ended" if self._is_over(name.step) else "unknown"
        try:
            [row] = batch.rows_of(np.array([name.prompt]), np.array([name.sibling])).tolist()
        except IllegalTransition:
            return "unknown"
        if not 1 <= name.attempt <= batch.lives[row]:
            return "unknown"
        if batch.state[row] >= SampleState.FINISHED:
            return "ended"
        return Place(batch, row) if name.attempt == batch.lives[row] else "replaced"

    def _is_over(self, step: int) -> bool:
        """Whether the step is trained, or the evaluation has its figures."""
        ledger = self._ledger
        return version_of(step) in ledger.evaluated if is_evaluation(step) else step < ledger.committed_steps

    def open(self, batch: StepBatch) -> list[Place]:
        """Episodes of ``batch`` that are not over, in order."""
        return [Place(batch, row) for row in np.flatnonzero(batch.state < SampleState.FINISHED).tolist()]

    def apply(self, event: ev.Event) -> None:
        """Raises:
        NotAccepted: it does not fit; nothing has changed.
        """
        try:
            outcome = self._scope.journaled.apply(event)
        except IllegalTransition as error:
            raise NotAccepted(str(error)) from error
        for name, numbers in outcome.broken.items():
            if (worker := self._scope.workers.by_name.get(name)) is not None:
                self._fleet.returns.stop(worker, numbers)
        self._fleet.returns.after(outcome)

    async def durable(self) -> None:
        """Until all that has been applied is on disk."""
        await self._scope.journaled.journal.durable()

    async def news(self, key: Key) -> None:
        """Until something has happened to this episode that somebody may wait for. The caller has a deadline."""
        await self._news.setdefault(key, asyncio.Event()).wait()

    def tell(self, key: Key) -> None:
        """Whoever waits for news of this episode looks again."""
        if (news := self._news.pop(key, None)) is not None:
            news.set()

    def _turns_over(self, rows: Rows) -> None:
        for step, of_step in rows.items():
            batch = self._ledger.batches[step]
            for row in of_step.tolist():
                self.tell(Place(batch, row).key)


def shown(name: EpisodeName) -> str:
    """An episode as people name it."""
    return f"{name_of_batch(name.step)} prompt {name.prompt} sibling {name.sibling} (attempt {name.attempt})"
