"""When the machines that train hand over to the others, and when they go back to generating.

generate ─ policies.hand_over: the trainer would not wait ─▶ train ─ a step is trained, or it ran dry ─▶ generate
             ▲ less what the estimate was too high by in the steps before ──── learn ◀── a step is trained

The estimate of the trainer's wait leans to one side for a given job. What it truly waited is known once a step is
trained, so the difference is learned from step to step and taken off, as RLBoost learns its window. The middle one of
the last three counts: a step in which all came much sooner than expected says nothing of the next. Time that is taken
off a wait, or is to be spared, is told to the policy as training that the trainer has, or lacks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from actors.policies.seeding import hand_over
from benchmarks.papers.cluster.moving_engine import Sample
from benchmarks.papers.cluster.overlapping.pool import Engine, Pool
from benchmarks.papers.cluster.overlapping.settings import Machines, Rules
from benchmarks.papers.cluster.overlapping.steps import SAMPLES_MAX, Step, Steps, feeding_places
from benchmarks.papers.cluster.overlapping.trainer import Trainer

LEARNED_STEPS = 3
"""Steps whose errors are looked at."""


class Sides:
    """Decides which of its two occupations a machine that trains follows."""

    def __init__(self, machines: Machines, rules: Rules, steps: Steps, pool: Pool, trainer: Trainer) -> None:
        self._m, self._rules, self._steps, self._pool, self._trainer = machines, rules, steps, pool, trainer
        self._too_high_s = list[float]()
        """Seconds by which the estimate of the trainer's wait was too high, in each step."""
        self._expected: tuple[float, float] | None = None
        """Instant of this step's hand-over, and the wait that was expected."""

    def change(self, version: int, idle: bool, now_s: float, take_back: Callable[[Engine], None]) -> bool:
        """Change over if it is time to; ``take_back`` is told of engines whose samples others go on with."""
        pool, step = self._pool, self._steps.open[version]
        if not pool.local or pool.since_s > now_s:
            return False
        if pool.generating:
            if not self._should_train(version, now_s):
                return False
            pool.generating = False
            for one in pool.local:
                take_back(one)
            self._feed(step, version)
        else:
            if not self._rules.returns or not idle or not step.unfinished:
                return False
            view = _sooner(self._view(version, now_s), lean_s(self._too_high_s))
            if not hand_over.should_return(view, switch_s=self._m.switch_s):
                return False
            pool.generating, self._expected = True, None
        pool.since_s = now_s + self._m.switch_s
        return True

    def learn(self, step: Step) -> None:
        """What the trainer waited in a step that is trained, or would have, had it begun at the hand-over."""
        if self._expected is None:
            return
        (at_s, expected_s), self._expected = self._expected, None
        ends_s: dict[int, float] = {}
        train_s: dict[int, float] = {}
        comes: list[tuple[float, float]] = []
        for sample in step.samples:
            work_s, end_s = self._m.train_s([sample]), sample.finished_s - at_s
            ends_s[sample.group] = max(ends_s.get(sample.group, 0.0), end_s)
            train_s[sample.group] = train_s.get(sample.group, 0.0) + (1 - self._m.early) * work_s
            comes.append((end_s, self._m.early * work_s))
        comes += [(end_s, train_s[group]) for group, end_s in ends_s.items()]
        ready_s = sum(work_s for end_s, work_s in comes if end_s <= 0)
        later = [one for one in comes if one[0] > 0]
        if later:
            self._too_high_s.append(expected_s - hand_over.waited_s(ready_s, later))

    def _should_train(self, version: int, now_s: float) -> bool:
        step = self._steps.open[version]
        if not step.unfinished or not step.arrived:
            return not step.unfinished
        view = self._view(version, now_s)
        if not hand_over.should_train(_sooner(view, lean_s(self._too_high_s) - self._rules.slack_s)):
            return False
        expected_s = hand_over.wait_s(view) if self._rules.learns else math.inf
        self._expected = (now_s, expected_s) if math.isfinite(expected_s) else None
        return True

    def _view(self, version: int, now_s: float) -> hand_over.HandOverView:
        """What is left of the step that is trained next."""
        m, step, first = self._m, self._steps.open[version], version * SAMPLES_MAX
        running, queued = list[hand_over.Left](), list[hand_over.Left]()
        others = self._pool.others()
        for one in (*self._pool.local, *others):
            one.engine.advance(now_s)
            for sample in one.engine.held():
                mine = first <= sample.number < first + SAMPLES_MAX
                has = one.engine.tokens(sample) if sample.number in one.engine.running else sample.kept
                left = self._left(sample, has, mine=mine)
                if not one.local and sample.number in one.engine.running:
                    running.append(left)
                elif mine:
                    queued.append(left)
        queued += [self._left(sample, sample.kept, mine=True) for sample in step.queue]
        place = feeding_places(step, [*running, *queued])
        queued.sort(key=lambda left: place[left.group])
        return hand_over.HandOverView(
            ready_s=self._trainer.left_s(step, step.arrived) + self._trainer.early_s(step),
            running=running,
            queued=queued,
            train_s={group: (1 - m.early) * train_s for group, train_s in step.group_s.items()},
            workers=len(others),
            places=m.instance.places,
            cache_tokens=m.instance.kv_tokens,
            pace=m.instance.pace,
            more_waits=any(other.queue for number, other in self._steps.open.items() if number != version),
            helpers=len(self._pool.local),
            begin_s=min((max(0.0, e.ready_s - now_s) if e.version < 0 else 0.0 for e in others), default=0.0),
        )

    def _left(self, sample: Sample, has: float, *, mine: bool) -> hand_over.Left:
        left = self._steps.left(sample, has, sample.group if mine else -1)
        if not mine or not self._m.early:
            return left
        each_s = self._steps.of(sample).each_s[sample.number % SAMPLES_MAX]
        return left._replace(early_s=self._m.early * each_s)

    def _feed(self, step: Step, version: int) -> None:
        """Order what is queued so that the trainer, which waits for it from now on, is fed best."""
        lefts = [self._steps.left(s, s.kept, s.group) for s in step.queue]
        first = version * SAMPLES_MAX
        for one in self._pool.others():
            mine = (s for s in one.engine.running.values() if first <= s.number < first + SAMPLES_MAX)
            lefts += [self._steps.left(s, one.engine.tokens(s), s.group) for s in mine]
        place = feeding_places(step, lefts)
        step.queue = deque(sorted(step.queue, key=lambda s: place[s.group]))


def lean_s(too_high_s: Sequence[float]) -> float:
    """What the estimate leans by; ``too_high_s``: by how much it was too high in the steps before, the newest last."""
    return median(too_high_s[-LEARNED_STEPS:]) if too_high_s else 0.0


def _sooner(view: hand_over.HandOverView, by_s: float) -> hand_over.HandOverView:
    """The same, with all groups so much sooner than the trainer needs them."""
    return replace(view, ready_s=view.ready_s + by_s)
