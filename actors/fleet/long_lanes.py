"""Dedicated workers for what is expected to be long: chosen once a step, from the workers' own measured pace.

    first hand-out of a step ─▶ dispatch_long.decide(estimates, latency tables, past) ─▶ how many workers, which groups
    every hand-out of it     ─▶ groups carry whom they are kept for, or kept from ─▶ policies.assign

Invariants
- The choice holds for all of the step: a worker with few long samples decodes fast only as long as it has few.
- Without estimates of at least half of the groups, or without a latency table of each worker, nobody is dedicated;
  nor, by replay, before a committed step has shown what estimates are worth.
- What workers still have of earlier steps counts: a dedicated worker must have the time. One that rests or leaves at
  that moment is not asked: it has no place for anything.
- It is a preference: where the dedicated workers are gone, or idle, the assignment policy overrules it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from actors.policies import dispatch_long
from actors.policies.dispatch_long import Past
from actors.policies.generation_time import Instance
from actors.policies.view import GroupView, WorkerView

KNOWN_MIN = 0.5
"""Part of the groups that must have an estimate."""
Held = Mapping[str, tuple[int, ...]]
"""Worker → the tokens that are probably left of each sample that it has begun."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """Some workers are dedicated to the long prompts of a step."""

    dedicated: frozenset[str]
    long_prompts: frozenset[int]


_NONE = Lanes(frozenset(), frozenset())


class LongLanes:
    """It keeps the choice of each step that is being handed out."""

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
        """The groups of ``step``, with whom they are kept for. ``begun``: some of it has been handed out before."""
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
        """How many workers are."""
        return len(self._lanes.get(step, _NONE).dedicated)


def choose(
    groups: list[GroupView],
    workers: list[WorkerView],
    prompt_tokens: float,
    past: Sequence[Past],
    held: Callable[[], Held] = dict,
) -> Lanes:
    """Who is dedicated to which of these groups, all of them not begun yet; ``past``: committed steps, the newest."""
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
