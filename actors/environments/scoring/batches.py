"""The interface of a reward that scores many responses at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from actors.environments.scoring.examples import Example
from actors.environments.scoring.scorer_frames import ScorerVerdict
from configs.schema import DataConfig


@dataclass(frozen=True, slots=True)
class Asked:
    """Holds one response to be scored, and the example that it answers."""

    response: str
    example: Example
    data: DataConfig
    """Source of the row in the job file."""


class BatchScorer(Protocol):
    """Scores many responses at once."""

    batch: int
    """Number of responses that it scores at once, at most."""

    def score(self, asked: Sequence[Asked], alive: Callable[[], None]) -> list[ScorerVerdict]:
        """One verdict for each of ``asked``, in order. ``alive`` is called whenever a part of the work is done.

        Raises:
            RewardRefused: no repeat will mend the error.
        """
        ...

    def try_once(self, asked: Asked) -> ScorerVerdict:
        """As ``score`` of one response, before the run; raises RewardRefused for what would fail every response."""
        ...
