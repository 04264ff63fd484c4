"""Dedicates workers to long samples: chosen once per step, from the workers' measured latency.

    first hand-out of a step ─▶ dispatch_long.decide(estimates, latency tables, past) ─▶ how many workers, which groups
    every hand-out of it     ─▶ groups say which workers they are kept for, or from ─▶ policies.assign

Invariants
- The choice holds for the whole step, since a worker with few long samples decodes fast only as long as it has few.
- No worker is dedicated unless half of the groups have estimates and every worker has a latency table; if the number
  is found by replay, not before a committed step has shown what estimates are worth.
- Samples that workers still have of earlier steps count, since a dedicated worker must have the time. A worker that
  rests or leaves at that moment is not considered.
- The choice is a preference: if the dedicated workers are gone, or idle, the assignment policy overrules it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from actors.policies.assigning import dispatch_long
from actors.policies.assigning.dispatch_long import Past
from actors.policies.assigning.generation_time import Instance
from actors.policies.assigning.view import GroupView, WorkerView

KNOWN_MIN = 0.5
"""Fraction of the groups that must have an estimate."""
Held = Mapping[str, tuple[int, ...]]
"""Worker → the tokens that each sample which it has begun probably still needs."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """Lanes say which workers are dedicated to which long prompts of a step."""

    dedicated: frozenset[str]
    long_prompts: frozenset[int]


_NONE = Lanes(frozenset(), frozenset())


class LongLanes:
    """The choice is kept here for each step that is being handed out."""

    def __init__(self, *, dedicates: bool = True) -> None:
        self._dedicates = dedicates
        self._lanes: dict[int, Lanes] = {}

    def mark(
        self,
        step: int,
        groups: list[GroupView],
        workers: list[WorkerView],
        prompt_tokens: float,
        past: Sequence[Past],
        held: Callable[[], Held],
        *,
        begun: bool,
    ) -> list[GroupView]:
        """The groups of ``step``, marked with the workers that they are kept for. ``begun``: it was begun before."""
        if step not in self._lanes:
            self._lanes = {s: lanes for s, lanes in self._lanes.items() if s > step - 8}
            chooses = self._dedicates and not begun
            self._lanes[step] = choose(groups, workers, prompt_tokens, past, held) if chooses else _NONE
        lanes = self._lanes[step]
        if not lanes.dedicated:
            return groups
        return [
            group._replace(kept_for=lanes.dedicated)
            if group.prompt in lanes.long_prompts
            else group._replace(not_for=lanes.dedicated)
            for group in groups
        ]

    def dedicated(self, step: int) -> int:
        """How many workers are dedicated in ``step``."""
        return len(self._lanes.get(step, _NONE).dedicated)


def choose(
    groups: list[GroupView],
    workers: list[WorkerView],
    prompt_tokens: float,
    past: Sequence[Past],
    held: Callable[[], Held] = dict,
) -> Lanes:
    """Choose which workers to dedicate to which of ``groups``, none of which has begun.

    ``past``: the newest committed steps.
    """
    expected = np.array([group.expected_tokens for group in groups])
    known = np.isfinite(expected)
    workers = [worker for worker in workers if worker.slots]
    if len(workers) < 2 or not len(groups) or known.mean() < KNOWN_MIN:
        return _NONE
    if any(worker.latency.empty for worker in workers):
        return _NONE
    sizes = np.array([len(group.rows) for group in groups])
    estimates = np.repeat(np.where(known, expected, np.median(expected[known])), sizes)
    left = held()
    instances = [Instance(w.latency, w.slots, held_tokens=left.get(w.name, ())) for w in workers]
    dispatch = dispatch_long.decide(estimates, instances, prompt_tokens=round(prompt_tokens), past=past)
    if not dispatch.dedicated:
        return _NONE
    first_of_group = np.cumsum(sizes) - sizes
    long = set(np.concatenate(dispatch.samples[: dispatch.dedicated]).tolist())
    names = frozenset(workers[i].name for i in dispatch.workers[: dispatch.dedicated])
    prompts = (group.prompt for group, first in zip(groups, first_of_group.tolist(), strict=True) if first in long)
    return Lanes(names, frozenset(prompts))
