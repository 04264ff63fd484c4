"""Which workers hand over the rest of their part, so that they can be released (RLHFless, arXiv 2602.22718).

    a worker has finished ``cut_at`` of its samples, others have room for what is left ─▶ Cut(source, target, samples)

In words:

- Each worker is looked at by itself, the one with the least left first. RLHFuse cuts all at one moment, to one worker.
- All that is left goes, or nothing: only a worker with nothing to do can be released. Where there is no room for all of
  it, it stays until the next look.
- The nearest worker that still has something to do takes it; of equally near ones, the one that is busy longest.
- The worker with the longest part is never cut, since all wait for it; nor is one that takes something in this look.

Pure: the workers of one step in, moves out. The caller asks again later about what could not be moved now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class CutWorker(NamedTuple):
    """Describes a worker of the step's plan that has not been released."""

    name: str
    assigned: int
    """Samples of the step that the worker was given or that were moved to it, finished ones included."""
    done: int
    """Samples of these that are finished."""
    free: int
    """Samples that the worker could begin at once."""
    movable: int
    """Unfinished samples that may still move; unless all may, none is moved."""
    rest_tokens: float
    """Tokens that its longest unfinished sample is still expected to need; NaN: unknown."""
    distance_s: float = 0.0
    """Seconds that it takes to move samples to this worker; the nearer it is, the fewer."""
    holds_longest: bool = False
    """Whether the worker has the longest part of the plan, which is never cut."""

    @property
    def rest(self) -> int:
        """Samples that the worker has not finished."""
        return self.assigned - self.done


@dataclass(frozen=True, slots=True)
class CutView:
    """Holds what is known of a step that is being generated."""

    workers: Sequence[CutWorker]
    cut_at: float
    """Part of its samples that a worker must have finished to be cut; 1: none is cut."""


class Cut(NamedTuple):
    """Moves samples from a source to a target. The cuts of a source take all that it has left: it can be released."""

    source: str
    target: str
    samples: int


def decide(view: CutView, now: float) -> list[Cut]:
    """The cuts to order now. ``now`` is not used: nothing in the rule depends on the time."""
    there = [worker for worker in view.workers if worker.rest > 0]
    free = {worker.name: max(0, worker.free) for worker in there}
    stays = {worker.name for worker in there if worker.holds_longest}
    cuts: list[Cut] = []
    for source in sorted(there, key=lambda one: (one.rest, one.name)):
        ripe = source.done >= view.cut_at * source.assigned and source.movable >= source.rest
        others = [one for one in there if one.name in free and one.name != source.name]
        if not ripe or source.name in stays or sum(free[one.name] for one in others) < source.rest:
            continue
        left = source.rest
        for target in sorted(others, key=lambda one: (one.distance_s, -np.nan_to_num(one.rest_tokens), one.name)):
            moved = min(left, free[target.name])
            if moved:
                cuts.append(Cut(source.name, target.name, moved))
                free[target.name] -= moved
                stays.add(target.name)  # what it just got is not moved on at once
                left -= moved
        del free[source.name]
    return cuts
