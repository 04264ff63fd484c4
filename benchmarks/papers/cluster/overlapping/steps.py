"""The steps that are open: their samples, the queue of each, and what is known of what is left.

    draw ─▶ queue, in the order of the policy ─▶ engines ─▶ finished ─▶ whole groups arrive ─▶ trained, in order

Invariants
- A sample is in its step's queue, or held by one engine, or finished. A group arrives once, when all of it is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from actors.policies.seeding import hand_over
from benchmarks.papers.cluster.moving_engine import Sample
from benchmarks.papers.cluster.overlapping.settings import Machines, Order, Rules

SAMPLES_MAX = 1 << 20
"""Samples of a step at most: their numbers count on from one step to the next."""


@dataclass(slots=True, eq=False)
class Step:
    """A step is open from its draw until it is trained."""

    samples: list[Sample]
    expected: np.ndarray
    missing: dict[int, int]
    """Group → samples of it that are not finished."""
    each_s: list[float]
    """Training of each sample as expected."""
    group_s: dict[int, float]
    """Training of each group that is not complete."""
    queue: deque[Sample]
    unfinished: int
    untrained: int
    arrived: list[Sample] = field(default_factory=list[Sample])
    """Samples of complete groups."""
    waiting: dict[int, list[Sample]] = field(default_factory=dict[int, list[Sample]])
    """Group → its finished samples, of the groups that are not complete."""
    scored: set[int] = field(default_factory=set[int])
    """Samples of which the trainer has done what need not wait for their group."""
    version: dict[int, int] = field(default_factory=dict[int, int])
    """Version of the newest tokens, of samples that have moved."""

    def scorable(self) -> list[Sample]:
        """Finished samples of groups that are not complete, of which nothing has been done."""
        return [s for waiting in self.waiting.values() for s in waiting if s.number not in self.scored]


class Steps:
    """Holds the open steps. ``draw(step)`` gives samples; ``expect(step, samples)`` a ranker's lengths."""

    def __init__(
        self,
        draw: Callable[[int], list[Sample]],
        expect: Callable[[int, Sequence[Sample]], np.ndarray],
        machines: Machines,
        rules: Rules,
    ) -> None:
        self._draw, self._expect, self._m, self._rules = draw, expect, machines, rules
        self.open: dict[int, Step] = {}
        self.job_steps: int | None = None
        """Steps that the job has; None: it goes on."""

    def open_for(self, version: int, staleness: int) -> bool:
        """All that this version may generate; whether one is new."""
        newest = version + staleness if self.job_steps is None else min(version + staleness, self.job_steps - 1)
        new = [n for n in range(version, newest + 1) if n not in self.open]
        for number in new:
            self.open[number] = self._begun(number)
        return bool(new)

    def _begun(self, number: int) -> Step:
        samples = [replace(s, number=number * SAMPLES_MAX + i) for i, s in enumerate(self._draw(number))]
        expected = np.minimum(self._expect(number, samples), self._m.longest_tokens)
        missing: dict[int, int] = {}
        group_s: dict[int, float] = {}
        each_s: list[float] = []
        for sample, tokens in zip(samples, expected.tolist(), strict=True):
            guess = replace(sample, length=max(1, int(tokens)))
            missing[sample.group] = missing.get(sample.group, 0) + 1
            each_s.append(self._m.train_s([guess]))
            group_s[sample.group] = group_s.get(sample.group, 0.0) + each_s[-1]
        queue = deque(samples[i] for i in _in_order(self._rules.order, expected, samples))
        return Step(samples, expected, missing, each_s, group_s, queue, len(samples), len(samples))

    def of(self, sample: Sample) -> Step:
        """The step that a sample belongs to."""
        return self.open[sample.number // SAMPLES_MAX]

    def finished(self, sample: Sample) -> None:
        """It is generated."""
        step = self.of(sample)
        step.unfinished -= 1
        step.missing[sample.group] -= 1
        step.waiting.setdefault(sample.group, []).append(sample)
        if not step.missing[sample.group]:
            step.arrived += step.waiting.pop(sample.group)
            del step.group_s[sample.group]

    def left(self, sample: Sample, has: float, group: int) -> hand_over.Left:
        """As far as anybody knows."""
        number, i = divmod(sample.number, SAMPLES_MAX)
        expected = float(self.open[number].expected[i])
        tokens = hand_over.left_tokens(expected, has, self._m.longest_tokens)
        return hand_over.Left(tokens, group, sample.prompt_tokens + has + self._rules.booked * tokens)


def feeding_places(step: Step, lefts: Sequence[hand_over.Left]) -> dict[int, int]:
    """Group → its place in the order that feeds a waiting trainer best."""
    left_tokens: dict[int, float] = {}
    for left in lefts:
        left_tokens[left.group] = left_tokens.get(left.group, 0.0) + left.tokens
    return {group: i for i, group in enumerate(feeding_order(left_tokens, step.group_s))}


def feeding_order(left_tokens: Mapping[int, float], train_s: Mapping[int, float]) -> list[int]:
    """Groups in the order in which a trainer that waits is fed best: most training for the tokens still to generate."""
    return sorted(train_s, key=lambda group: (-train_s[group] / max(left_tokens.get(group, 0.0), 1.0), group))


def _in_order(order: Order, expected: np.ndarray, samples: Sequence[Sample]) -> list[int]:
    """Positions; siblings stay together, a group counts as long as its longest."""
    if order == "arrival":
        return list(range(len(samples)))
    longest: dict[int, float] = {}
    for sample, tokens in zip(samples, expected.tolist(), strict=True):
        longest[sample.group] = max(longest.get(sample.group, 0.0), tokens)
    groups = sorted(longest, key=lambda g: (-longest[g], g))
    if order == "both_ends":
        groups = [groups[i // 2] if i % 2 else groups[-1 - i // 2] for i in range(len(groups))]
    place = {group: i for i, group in enumerate(groups)}
    return sorted(range(len(samples)), key=lambda i: (place[samples[i].group], -float(expected[i]), i))
