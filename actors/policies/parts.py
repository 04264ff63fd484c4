"""Which neighbours of a step's prompts, sorted by expected length, make up the part of each worker.

    longest ─────────────────────────────────────────── shortest
    even       │    part 0    │    part 1    │    part 2    │     equal numbers of prompts (RLHFless, arXiv 2602.22718)
    balanced   │p0│   part 1   │           part 2            │     all end with part 0, as predicted; this project's own

With equal numbers the part of the longest prompts is as full as the others, so it decodes as slowly, for longer: the
step waits for it. Balanced gives the first worker so few prompts that the others, each filled until it would end no
later, just hold the rest. Since part 0 ends last, what the others wait for before they begin is hidden by it (B.7).

Invariants
- Every prompt is in exactly one part, and parts are consecutive.
- ``balanced`` ends no later than any other parts of these workers in this order do, but for one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from actors.policies.part_ends import PartEnds


class Pace(NamedTuple):
    """It says when a worker ends that begins with no prompt but what it is given."""

    ends: PartEnds
    factor: float = 1.0
    """Factor by which it is slower than what ``ends`` was computed for."""
    after_s: float = 0.0
    """Seconds until it can begin."""

    def end_s(self, first: int, beyond: int) -> float:
        """When it ends with these prompts; 0 for none: it is not needed."""
        return self.after_s + self.factor * float(self.ends.ends(first)[beyond - first - 1]) if beyond > first else 0.0

    def beyond(self, first: int, until_s: float) -> int:
        """Position behind the last prompt with which it ends in time."""
        given_s = (until_s - self.after_s) / self.factor
        return first + int(np.searchsorted(self.ends.ends(first), given_s * (1 + 1e-12), side="right"))


def even(prompts: int, workers: int) -> list[int]:
    """Where each part ends, for as many workers, which are no more than prompts."""
    return [prompts * (i + 1) // workers for i in range(workers)]


def balanced(prompts: int, workers: Sequence[Pace]) -> list[int]:
    """Where the part of each of these workers ends; one that would not be in time gets nothing."""
    least, most = 1, prompts
    while least < most:  # part 0 of this many prompts holds everybody back for as long as it takes
        first = (least + most) // 2
        if _filled(prompts, workers, first)[-1] == prompts:
            most = first
        else:
            least = first + 1
    return _filled(prompts, workers, least)


def _filled(prompts: int, workers: Sequence[Pace], first: int) -> list[int]:
    """As ``balanced``, with so many prompts in part 0; the last end is before ``prompts`` where they do not fit."""
    until_s, ends = workers[0].end_s(0, first), [first]
    for worker in workers[1:]:
        ends.append(worker.beyond(ends[-1], until_s) if ends[-1] < prompts else prompts)
    return ends
