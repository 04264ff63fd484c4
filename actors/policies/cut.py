"""Which workers hand over the rest of their part, so that they can be released (RLHFless, arXiv 2602.22718).

    a worker has finished ``cut_at`` of its samples, others have room for what is left ─▶ Cut(source, target, samples)

Pure: the workers of one step in, moves out. Whoever asks says again later what could not be moved now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class CutWorker(NamedTuple):
    """It is one worker of the step's plan that has not been released."""

    name: str
    assigned: int
    """Samples of the step that were its own, finished ones included, and what was moved to it."""
    done: int
    """Finished ones of these."""
    free: int
    """Samples that it could begin at once."""
    movable: int
    """Unfinished ones that may still move; fewer than all are left where they are."""
    rest_tokens: float
    """Tokens that its longest unfinished sample is expected to need yet; NaN: unknown."""
    distance_s: float = 0.0
    """Seconds that it takes to get something there; the nearer the worker, the fewer."""
    holds_longest: bool = False
    """Whether it has the longest part of the plan, which is never cut."""


@dataclass(frozen=True, slots=True)
class CutView:
    """It is what is known of a step that is being generated."""

    workers: Sequence[CutWorker]
    cut_at: float
    """Part of its samples that a worker must have finished; 1: nobody is cut."""


class Cut(NamedTuple):
    """It moves some of what is left. All cuts of one source together take everything, so it can be released."""

    source: str
    target: str
    samples: int


def decide(view: CutView, now: float) -> list[Cut]:
    """The cuts to order now. ``now`` is not used: nothing in the rule depends on the time."""
    raise NotImplementedError("cutting a part is not built yet")
