"""The trainer of a combined cluster: whole groups of one step after the other."""

from __future__ import annotations

import math

from supervisors.simulation.cluster.overlapping.settings import NEVER_S, Machines
from supervisors.simulation.cluster.overlapping.steps import Step


class Trainer:
    """A micro-batch, then the next; after a step's last one the optimizer."""

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
        if not self.idle or not step.arrived:
            return
        m, work_s = self._m, self._m.train_s(step.arrived)
        if step.unfinished and (len(step.arrived) < m.least_samples or work_s < m.least_s):
            return
        self._batch, step.arrived = len(step.arrived), []
        self._end_s = now_s + max(work_s, m.least_s)
