"""Numbered calls of one life of a bundle: each is computed once, however often it is asked for.

    number = last + 1 ─▶ begin: the answer is under way     number = last ─▶ that answer, or the one that is under way
    anything else     ─▶ CallOutOfOrder

Invariants
- One call at a time: the next is taken when the last has its answer.
- Exactly one answer is kept, the last: a trainer that asks for the next has it.
"""

from __future__ import annotations

import asyncio

from actors.protocol.training import TrainAnswer
from actors.train_service.errors import CallOutOfOrder


class CallLog:
    """It remembers the last call of one life, ``number`` (0: there was none), and its answer."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._answer: asyncio.Future[TrainAnswer] | None = None
        self.number = 0

    @property
    def is_busy(self) -> bool:
        """Whether a call has no answer yet."""
        return self._answer is not None and not self._answer.done()

    def repeated(self, number: int) -> asyncio.Future[TrainAnswer] | None:
        """The answer of a call that has been made; None: it is the next one, ``begin`` it.

        Raises:
            CallOutOfOrder: it is neither.
        """
        if self._answer is not None and number == self.number:
            return self._answer
        if number != self.number + 1:
            raise CallOutOfOrder(f"job {self._job}: call {number} came after call {self.number}; nothing was computed")
        if self.is_busy:
            raise CallOutOfOrder(f"job {self._job}: call {number} came while call {self.number} is being computed")
        return None

    def begin(self) -> asyncio.Future[TrainAnswer]:
        """The place for the next call's answer."""
        self.number += 1
        self._answer = asyncio.get_running_loop().create_future()
        return self._answer
