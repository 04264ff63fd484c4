"""What a reward that scores many responses at once is asked, and what it says of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from actors.environments.scoring.examples import Example
from configs.schema import DataConfig


@dataclass(frozen=True, slots=True)
class Asked:
    """Holds one response to be scored, and what it answers."""

    response: str
    example: Example
    data: DataConfig
    """The source of its row, as the job file has it."""


@dataclass(frozen=True, slots=True)
class Found:
    """Holds a reward or, if that is None, why there is none."""

    reward: float | None
    reason: str = ""
    cut: bool = False
    """Whether it was scored without its beginning, for it was too long."""


class BatchScorer(Protocol):
    """It scores many responses at once."""

    batch: int
    """Responses that it takes at once, at most."""

    def score(self, asked: Sequence[Asked], alive: Callable[[], None]) -> list[Found]:
        """One for each of ``asked``, in order. ``alive`` is called whenever a part of the work is done.

        Raises:
            RewardRefused: no repeat will mend it.
        """
        ...

    def try_once(self, asked: Asked) -> Found:
        """As ``score``, before the run: what is wrong with the whole of it is refused."""
        ...
