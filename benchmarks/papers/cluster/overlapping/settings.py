"""What a combined cluster is made of, what its policy is allowed, and what a run came to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from actors.policies.generation_time import Instance
from benchmarks.papers.cluster.moving_engine import Sample

NEVER_S = math.inf
UNSETTLED_STEPS = 4
"""Of a job with one step of staleness, after a cold start; as they turn out on StreamRL's set-ups."""
Order = Literal["longest", "both_ends", "arrival"]


@dataclass(frozen=True, slots=True)
class Machines:
    """What there is, and what it takes."""

    instance: Instance
    """Of each engine."""
    fixed: int
    """Engines on machines that never train and never leave."""
    local: int
    """Engines on the machines that train; 0: those only train."""
    train_s: Callable[[Sequence[Sample]], float]
    step_s: float
    """Of the optimizer."""
    pull_s: Callable[[int], float]
    """Number of engines that pull at once → from a version's end of training until they have it."""
    load_s: float
    """Of it, for which an engine stands still."""
    early: float = 0.0
    """Of a sample's training, the part that need not wait for its group: it needs no advantage."""
    switch_s: float = 0.0
    """One change between generating and training."""
    start_s: float = 0.0
    """From the job's begin until the machines that train generate for the first time."""
    boot_s: float = 0.0
    reserved_price: float = 0.0
    """All that stay, an hour."""
    spot_price: float = 0.0
    """One that comes and goes, an hour."""
    least_samples: int = 1
    """In a micro-batch, if more are to come."""
    least_s: float = 0.0
    """Work in it; a smaller one takes as long."""
    longest_tokens: float = math.inf
    """No response is longer (``sampling.max_tokens``), whatever a ranker expects."""


@dataclass(frozen=True, slots=True)
class WindowRules:
    """RLBoost's rules for how long the machines that train generate at the beginning of a step."""

    first_s: float
    """Window of the first step."""
    damping: float
    """Part of an imbalance by which the window changes, as its inverse (eta)."""
    remember: bool = True
    """Whether a window that a number of machines arrived at is taken up again when that number comes back."""
    fixed_s: float | None = None
    """A window that does not adapt; 0: the machines that train leave generating to the others at once."""
    target: int | None = None
    """Machines that come and go taken at most; None: as many as the policy says."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the policy is allowed and how it is set."""

    staleness: int
    order: Order = "longest"
    by_price: bool = True
    """Of machines that come and go, as many as ``policies.worth_having`` says; else all that there are."""
    slack_s: float = 60.0
    """The time by which the trainer's next work has to come sooner than it is needed, for estimates that are wrong. A
    negative one is what the change itself takes: the trainer begins only after it."""
    returns: bool = True
    """Machines that train go back to generating when they run dry; else they generate at the begin only."""
    learns: bool = False
    """``policies.hand_over`` is told by how much its estimate of the trainer's wait was wrong in the steps before."""
    booked: float = 0.5
    """Of the tokens that a sample still needs, as expected, those that count as cached, where it begins and in the
    hand-over's estimate. To be put off once the cache is full costs a prefill; an engine half empty costs more."""
    look_every_s: float = 10.0
    """Between two looks at who is to change over and whose work is to move."""
    window: WindowRules | None = None
    """Where they are given, they say who generates when, in place of ``policies.hand_over``."""
    pending_cap: int = 0
    """Samples that may wait at one engine; 0: an engine gets those that it can begin."""
    keep_tokens: bool = True
    """Whether the samples of a machine that goes keep their tokens; else they begin anew."""
    relieves: bool = True
    """Whether samples of the oldest step move to engines with nothing to do once nothing is queued."""


@dataclass(slots=True)
class Figures:
    """What a run came to; one entry for each step that was trained."""

    ends_s: list[float] = field(default_factory=list[float])
    costs: list[float] = field(default_factory=list[float])
    """Paid by then."""
    tokens: list[int] = field(default_factory=list[int])
    lengths: list[np.ndarray] = field(default_factory=list[np.ndarray])
    rented_s: float = 0.0
    """Machine seconds of those that come and go."""
    changes: int = 0
    """Between generating and training."""
    windows: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """With ``WindowRules``: the window of each step, and how many machines that come and go were wanted after it."""

    def rates(self, last: int | None = None) -> tuple[float, float]:
        """Tokens a second and a dollar; with ``last``, of so many steps, the newest."""
        count = last or len(self.ends_s)
        ends, costs, first = [0.0, *self.ends_s], [0.0, *self.costs], -1 - count
        tokens = sum(self.tokens[-count:])
        return tokens / (ends[-1] - ends[first]), tokens / (costs[-1] - costs[first])

    def steady_step_s(self) -> float:
        """Mean time of a step, without the first, which live on what the begin left over, and without the last."""
        count = len(self.ends_s) - 1 - UNSETTLED_STEPS
        if count < 1:
            raise ValueError(f"{len(self.ends_s)} steps have no middle: {UNSETTLED_STEPS} and the last are left out")
        return (self.ends_s[-2] - self.ends_s[UNSETTLED_STEPS - 1]) / count
