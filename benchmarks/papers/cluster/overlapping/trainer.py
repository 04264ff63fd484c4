"""The trainer of a combined cluster: whole groups of one step after the other.

    whole groups there? ─▶ a micro-batch of them ──────────────────────────▶ after a step's last one the optimizer
          └ no ─▶ finished samples of others ─▶ what needs no advantage ─┘

The second is StreamRL's sample-level work (section 1.3): log-probabilities are computed when a sample arrives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.papers.cluster.moving_engine import Sample
from benchmarks.papers.cluster.overlapping.settings import NEVER_S, Machines
from benchmarks.papers.cluster.overlapping.steps import Step


class Trainer:
    """A trainer takes one micro-batch after the other."""

    def __init__(self, machines: Machines) -> None:
        self._m = machines
        self._batch = 0
        self._end_s = self._publish_s = NEVER_S

    @property
    def idle(self) -> bool:
        return math.isinf(self._end_s) and math.isinf(self._publish_s)

    def next_s(self) -> float:
        return min(self._end_s, self._publish_s)

    def end(self, now_s: float, step: Step) -> bool:
        """What is due; whether the step is trained, with the optimizer."""
        if self._end_s <= now_s:
            step.untrained -= self._batch
            self._end_s = NEVER_S
            if not step.untrained:
                self._publish_s = now_s + self._m.step_s
        if self._publish_s > now_s:
            return False
        self._publish_s = NEVER_S
        return True

    def begin(self, now_s: float, step: Step) -> None:
        """The next micro-batch, if there is enough for one."""
        if not self.idle:
            return
        work_s = self.left_s(step, step.arrived)
        if step.arrived and (not step.unfinished or self._enough(step.arrived, work_s)):
            self._batch, step.arrived = len(step.arrived), []
            self._end_s = now_s + max(work_s, self._m.least_s)
        elif self._m.early:
            self._score(now_s, step)

    def left_s(self, step: Step, samples: Sequence[Sample]) -> float:
        """Training of these, without what has been done of it."""
        early_s = self._m.train_s([s for s in samples if s.number in step.scored]) if step.scored else 0.0
        return (self._m.train_s(samples) if samples else 0.0) - self._m.early * early_s

    def early_s(self, step: Step) -> float:
        """What can be done of finished samples that wait for their group."""
        samples = step.scorable() if self._m.early else []
        return self._m.early * self._m.train_s(samples) if samples else 0.0

    def _score(self, now_s: float, step: Step) -> None:
        samples, work_s = step.scorable(), self.early_s(step)
        if self._enough(samples, work_s):
            step.scored.update(s.number for s in samples)
            self._batch = 0
            self._end_s = now_s + work_s

    def _enough(self, samples: Sequence[Sample], work_s: float) -> bool:
        return bool(samples) and len(samples) >= self._m.least_samples and work_s >= self._m.least_s
