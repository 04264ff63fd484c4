"""The rows of episodes in the ledger: found by name, changed by events, and awaited by those who need news of one.

Invariants
- An event that ends hand-outs also stops them at their workers.
- While an episode is live, its batch is in memory, and its row is not committed.
"""

from __future__ import annotations

import asyncio
import math
from typing import Final, NamedTuple

import numpy as np

from actors.fleet.fleet import Fleet
from actors.fleet.scope import JobScope, Rows
from actors.ledger import events as ev
from actors.ledger.batch import SampleState, StepBatch
from actors.ledger.errors import IllegalTransition
from actors.protocol.episodes import EpisodeName
from actors.protocol.evaluations import is_evaluation, name_of_batch, version_of
from actors.protocol.failures import NotAccepted
from actors.scheduler.episode_turns import EpisodeRow

LIVE: Final = "live"


class Key(NamedTuple):
    """A key names an episode, whichever life of its environment plays it."""

    step: int
    prompt: int
    sibling: int

    @classmethod
    def of(cls, name: EpisodeName) -> Key:
        return cls(name.step, name.prompt, name.sibling)


class EpisodePlace(NamedTuple):
    """An episode is at this place in the ledger."""

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
        """The row as an int32[1], for an event about this episode alone."""
        return np.array([self.row], np.int32)

    @property
    def waits(self) -> bool:
        """Whether it waits for its environment."""
        return bool(self.batch.state[self.row] == SampleState.WAITING)

    def view(self) -> EpisodeRow:
        return EpisodeRow(self.batch, self.row)


class EpisodeRows:
    """The classes that manage a job's episodes share this object for as long as their scheduler lives."""

    def __init__(self, scope: JobScope, fleet: Fleet) -> None:
        self._scope, self._fleet, self._ledger = scope, fleet, scope.ledger
        self._news: dict[Key, asyncio.Event] = {}

    def find(self, name: EpisodeName) -> EpisodePlace | str:
        """The place of an episode if ``name`` is the present life of its environment; else its status as a word."""
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
        return EpisodePlace(batch, row) if name.attempt == batch.lives[row] else "replaced"

    def reward(self, name: EpisodeName) -> float | None:
        """The reward with which the present life of an episode has ended; None if it has none, or is trained."""
        batch = self._ledger.batches.get(name.step)
        if batch is None or self.find(name) != "ended":
            return None
        [row] = batch.rows_of(np.array([name.prompt]), np.array([name.sibling])).tolist()
        reward = float(batch.reward[row])
        return reward if name.attempt == batch.lives[row] and math.isfinite(reward) else None

    def _is_over(self, step: int) -> bool:
        """Whether the step is trained, or the evaluation has its figures."""
        ledger = self._ledger
        return version_of(step) in ledger.evaluated if is_evaluation(step) else step < ledger.committed_steps

    def open(self, batch: StepBatch) -> list[EpisodePlace]:
        """Episodes of ``batch`` that are not over, in order."""
        return [EpisodePlace(batch, row) for row in np.flatnonzero(batch.state < SampleState.FINISHED).tolist()]

    def apply(self, event: ev.Event) -> None:
        """Raises:
        NotAccepted: the event does not fit the ledger; nothing has changed.
        """
        try:
            outcome = self._scope.ledger_writer.apply(event)
        except IllegalTransition as error:
            raise NotAccepted(str(error)) from error
        for name, numbers in outcome.broken.items():
            if (worker := self._scope.workers.by_name.get(name)) is not None:
                self._fleet.returns.stop(worker, numbers)
        self._fleet.returns.after(outcome)

    async def durable(self) -> None:
        """Wait until every event applied so far is on disk."""
        await self._scope.ledger_writer.journal.durable()

    async def news(self, key: Key) -> None:
        """Wait for the next ``tell`` about this episode. The caller sets the deadline."""
        await self._news.setdefault(key, asyncio.Event()).wait()

    def tell(self, key: Key) -> None:
        """Wake those who wait for news of this episode."""
        if (news := self._news.pop(key, None)) is not None:
            news.set()

    def turns_over(self, rows: Rows) -> None:
        """The turns of these episodes are over: wake those who wait for them."""
        for step, of_step in rows.items():
            batch = self._ledger.batches[step]
            for row in of_step.tolist():
                self.tell(EpisodePlace(batch, row).key)


def shown(name: EpisodeName) -> str:
    """The episode's name for log lines and messages."""
    return f"{name_of_batch(name.step)} prompt {name.prompt} sibling {name.sibling} (attempt {name.attempt})"
