"""Jobs on one training service, event by event, with the slice policy that a live service asks.

    job: rollouts ──▶ asks ──▶ waits ──▶ (its state is loaded) ──▶ computes ──▶ step done ──▶ rollouts of the next …

A slice is a whole step's burst, or one micro-batch, after which the policy chooses anew: the latter is what a service
does that treats every call for itself. A job of lag 1 generates for the next step while it trains. There is room for
the state of one job; whoever had the last slice finds its state in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from actors.policies.sharing.fair_share import FairShare
from actors.policies.sharing.slices import Asking, SliceRules, SliceView, slice_policy


@dataclass(frozen=True, slots=True)
class SharingJob:
    """It generates, and trains on the service."""

    rollouts_s: np.ndarray
    """Time that generation takes, of each step, float64[steps]."""
    burst_s: float
    """Time that the service computes for a step."""
    switch_s: float
    """Time to load its state."""
    lag: int = 0
    """Steps for which it generates ahead of training."""

    @property
    def steps(self) -> int:
        return len(self.rollouts_s)

    def alone_s(self) -> float:
        """Mean time of a step with a service of its own, where nothing is ever loaded."""
        return _Progress(self).alone_s()


@dataclass(frozen=True, slots=True)
class Shared:
    """Holds what came out, until the first job had done all of its steps."""

    slowdowns: tuple[float, ...]
    """Time of a step over that of the job alone, of each job."""
    busy: float
    """Part of the time in which the service computed."""
    switching: float
    """Part of the time in which it loaded states."""

    @property
    def mean_slowdown(self) -> float:
        return float(np.mean(self.slowdowns))


@dataclass(slots=True)
class _Progress:
    """Follows one job."""

    job: SharingJob
    trained: int = 0
    """Steps that are trained."""
    left: int = 0
    """Slices left of the step that is being trained."""
    generated_s: float = 0.0
    """Time at which the rollouts of the next step are there."""
    ended_s: float = 0.0
    """Time at which the last step was trained."""

    def begin(self, slices: int) -> None:
        self.left, self.generated_s = slices, float(self.job.rollouts_s[0])

    @property
    def asks_s(self) -> float:
        return max(self.generated_s, self.ended_s)

    def step_done(self, now_s: float, slices: int) -> None:
        """With lag 1, the next rollouts have begun when the last ones were there, and the step before was trained."""
        before_s, self.ended_s = self.ended_s, now_s
        self.trained += 1
        self.left = slices
        if self.trained < self.job.steps:
            begins_s = max(self.generated_s, before_s) if self.job.lag else now_s
            self.generated_s = begins_s + float(self.job.rollouts_s[self.trained])

    def alone_s(self) -> float:
        self.begin(1)
        for _ in range(self.job.steps):
            self.step_done(self.asks_s + self.job.burst_s, 1)
        return self.ended_s / self.job.steps


def share(jobs: Sequence[SharingJob], rules: SliceRules, *, micro_batches: int = 1) -> Shared:
    """Run ``jobs`` together until one has ended; ``micro_batches``: slices of a step."""
    decide, shares = slice_policy(rules), FairShare()
    progress = {f"job-{i}": _Progress(job) for i, job in enumerate(jobs)}
    for one in progress.values():
        one.begin(micro_batches)
    now_s = busy_s = switching_s = 0.0
    asked_s = {name: one.asks_s for name, one in progress.items()}
    resident: str | None = None
    while all(one.trained < one.job.steps for one in progress.values()):
        now_s = max(now_s, min(asked_s.values()))
        asking = list[Asking]()
        for name, one in progress.items():
            if asked_s[name] > now_s:
                shares.rests(name)
                continue
            shares.asks(name)
            estimate_s, switch_s = one.job.burst_s / micro_batches, 0.0 if name == resident else one.job.switch_s
            asking.append(Asking(name, asked_s[name], estimate_s, switch_s, used_s=shares.used_s(name)))
        run = decide(SliceView(asking, resident=() if resident is None else (resident,), last=resident), now_s).run
        assert run is not None
        one = progress[run]
        switch_s, compute_s = 0.0 if run == resident else one.job.switch_s, one.job.burst_s / micro_batches
        now_s, busy_s, switching_s = now_s + switch_s + compute_s, busy_s + compute_s, switching_s + switch_s
        shares.charge(run, switch_s + compute_s)
        resident, one.left = run, one.left - 1
        if not one.left:
            one.step_done(now_s, micro_batches)
        asked_s[run] = max(now_s, one.asks_s) if one.trained < one.job.steps else inf
    slowdowns = tuple(
        one.ended_s / one.trained / one.job.alone_s() if one.trained else inf for one in progress.values()
    )
    return Shared(slowdowns, busy_s / now_s, switching_s / now_s)


def random_rollouts_s(mean_s: float, variation: float, steps: int, rng: np.random.Generator) -> np.ndarray:
    """Log-normal times with that mean and coefficient of variation."""
    variance = np.log(1 + variation**2)
    return mean_s * rng.lognormal(-variance / 2, np.sqrt(variance), steps)
