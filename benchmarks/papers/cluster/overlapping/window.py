"""RLBoost's hand-over: the machines that train generate for a window of time, which is learned from step to step.

    a step begins ─▶ generate ── the window is over and others serve, or all is generated ──▶ train
                       ▲       the trainer has nothing to do, and no other machine is left ──┘

After each step ``policies.offload`` says how long the next window is, and how many machines are worth having.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from actors.policies.seeding import offload
from benchmarks.papers.cluster.overlapping.pool import Engine, Pool
from benchmarks.papers.cluster.overlapping.settings import Figures, Machines, WindowRules
from benchmarks.papers.cluster.overlapping.steps import Step, Steps


class Window:
    """Decides in place of ``Sides`` who generates; strictly on-policy."""

    def __init__(self, machines: Machines, rules: WindowRules, steps: Steps, pool: Pool, figures: Figures) -> None:
        self._m, self._rules, self._steps, self._pool, self._figures = machines, rules, steps, pool, figures
        self._policy = offload.OffloadRules(machines.local, rules.first_s, rules.damping)
        self._known = offload.first(self._policy)
        self._version, self._seed_s = -1, 0.0
        """Step whose window this is."""
        self._rented_before_s = self._busy_before_s = 0.0
        self._take()

    def change(self, version: int, idle: bool, now_s: float, take_back: Callable[[Engine], None]) -> bool:
        """As ``Sides.change``."""
        pool, step, others = self._pool, self._steps.open[version], self._pool.others()
        begins = version != self._version
        if begins:
            self._version, self._seed_s = version, self._next_window_s()
        if pool.since_s > now_s:
            return False
        if pool.generating:
            there = bool(others) if self._rules.fixed_s == 0 else any(e.version >= version for e in others)
            if step.unfinished and not (there and now_s >= pool.since_s + self._seed_s):
                return False
            for one in pool.local:
                take_back(one)
        elif not begins:
            if not idle or not step.unfinished or others:
                return False
            self._seed_s = max(self._seed_s, 1.0)
        pool.generating = not pool.generating
        pool.since_s = now_s + self._m.switch_s
        return True

    def learn(self, step: Step) -> None:
        """A step is trained: the next window and target."""
        figures, pool = self._figures, self._pool
        began_s, now_s = figures.ends_s[-2] if len(figures.ends_s) > 1 else 0.0, figures.ends_s[-1]
        rented_s, busy_s = figures.rented_s - self._rented_before_s, pool.others_busy_s() - self._busy_before_s
        self._rented_before_s, self._busy_before_s = figures.rented_s, pool.others_busy_s()
        mean = rented_s / (now_s - began_s)
        mean = round(mean) if abs(mean - round(mean)) < 1e-6 else mean
        train_s = self._m.train_s(step.samples)
        report = offload.StepReport(
            remote_mean=mean,
            remote_next=len(pool.spot),
            train_idle_s=max(0.0, now_s - self._m.step_s - pool.since_s - train_s),
            remote_idle_s=now_s - max(sample.finished_s for sample in step.samples),
            train_s=train_s,
            remote_s=busy_s / mean if mean else 0.0,
            seed_s=self._seed_s,
        )
        if self._rules.fixed_s is None:
            known = offload.after_step(self._policy, self._known, report)
            self._known = known if self._rules.remember else replace(known, memory={})
        self._take()
        figures.windows.append((self._seed_s, self._known.target))

    def _take(self) -> None:
        self._pool.most = self._known.target if self._rules.target is None else self._rules.target

    def _next_window_s(self) -> float:
        """The window of a step that begins. With no other machine it is for one that comes in time."""
        if self._rules.fixed_s is not None:
            return self._rules.fixed_s
        there = len(self._pool.spot)
        return offload.window_s(self._policy, self._known, there) if there else self._known.seed_s
