"""What a combined cluster is made of, what its policy is allowed, and what a run came to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from actors.policies.assigning.generation_time import Instance
from benchmarks.papers.cluster.moving_engine import Sample

NEVER_S = math.inf
UNSETTLED_STEPS = 4
"""Steps after a cold start, with one step of staleness, that are unlike later ones, as seen on StreamRL's set-ups."""
Order = Literal["longest", "both_ends", "arrival"]


@dataclass(frozen=True, slots=True)
class Machines:
    """Holds the machines that there are, and what each thing takes them."""

    instance: Instance
    """What each engine can do."""
    fixed: int
    """Engines on machines that never train and never leave."""
    local: int
    """Engines on the machines that train; 0: those only train."""
    train_s: Callable[[Sequence[Sample]], float]
    step_s: float
    """Seconds of the optimizer."""
    pull_s: Callable[[int], float]
    """Function of the number of engines that pull at once → seconds from a version's end of training until they have
    it."""
    load_s: float
    """Seconds of it for which an engine stands still."""
    early: float = 0.0
    """Part of a sample's training that need not wait for its group: it needs no advantage."""
    switch_s: float = 0.0
    """Seconds of one change between generating and training."""
    start_s: float = 0.0
    """Seconds from the job's begin until the machines that train generate for the first time."""
    boot_s: float = 0.0
    reserved_price: float = 0.0
    """Price of all that stay, an hour."""
    spot_price: float = 0.0
    """Price of one that comes and goes, an hour."""
    least_samples: int = 1
    """Samples in a micro-batch at least, if more are to come."""
    least_s: float = 0.0
    """Seconds of work in it at least; a smaller one takes as long."""
    longest_tokens: float = math.inf
    """Tokens of the longest response (``sampling.max_tokens``), whatever a ranker expects."""


@dataclass(frozen=True, slots=True)
class WindowRules:
    """Holds RLBoost's rules for how long the machines that train generate at the beginning of a step."""

    first_s: float
    """Window of the first step."""
    damping: float
    """Divisor (eta) of an imbalance, by which the window changes."""
    remember: bool = True
    """Whether a window that a number of machines arrived at is taken up again when that number comes back."""
    fixed_s: float | None = None
    """Window that does not adapt; 0: the machines that train leave generating to the others at once."""
    target: int | None = None
    """Machines that come and go taken at most; None: as many as the policy says."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Says what the policy is allowed and how it is set."""

    staleness: int
    order: Order = "longest"
    by_price: bool = True
    """Whether machines that come and go are as many as ``policies.worth_having`` says; else all that there are."""
    slack_s: float = 60.0
    """Seconds by which the trainer's next work has to come sooner than it is needed, for estimates that are wrong. A
    negative one is what the change itself takes: the trainer begins only after it."""
    returns: bool = True
    """Whether machines that train go back to generating when they have nothing to train; else they generate at the
    begin only."""
    learns: bool = False
    """Whether ``policies.hand_over`` is told how wrong its estimate of the trainer's wait was in the steps before."""
    booked: float = 0.5
    """Part of the tokens that a sample still needs, as expected, that counts as cached, where it begins and in the
    hand-over's estimate. To be put off once the cache is full costs a prefill; an engine half empty costs more."""
    look_every_s: float = 10.0
    """Seconds between two looks at who is to change over and whose work is to move."""
    window: WindowRules | None = None
    """Rules that say, where they are given, who generates when, in place of ``policies.hand_over``."""
    pending_cap: int = 0
    """Samples that may wait at one engine; 0: an engine gets those that it can begin."""
    keep_tokens: bool = True
    """Whether the samples of a machine that goes keep their tokens; else they begin anew."""
    relieves: bool = True
    """Whether samples of the oldest step move to engines with nothing to do once nothing is queued."""


@dataclass(slots=True)
class Figures:
    """Figures say what a run came to; their lists have one entry for each step that was trained."""

    ends_s: list[float] = field(default_factory=list[float])
    costs: list[float] = field(default_factory=list[float])
    """Money paid by then."""
    tokens: list[int] = field(default_factory=list[int])
    lengths: list[np.ndarray] = field(default_factory=list[np.ndarray])
    rented_s: float = 0.0
    """Machine seconds of those that come and go."""
    changes: int = 0
    """Changes between generating and training."""
    windows: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """Window of each step, and machines that come and go wanted after it; with ``WindowRules`` only."""

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
