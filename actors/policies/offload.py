"""How long the trainer's own engines generate before they hand over, and how many preemptible workers are worth having.

RLBoost (arXiv 2510.19225) section "adaptive rollout offload", Algorithm 1. In words:

- At the start of a step the trainer's machines generate too, for a window of ``seed_s``. Then they hand what is
  unfinished to remote workers, which go on after one prefill, and train on what has arrived. A window of time, not of
  requests: a count would wait for the longest of them.
- After each step the window grows by a part of the time in which the trainer waited for samples, and shrinks by that
  part of the time in which remote workers had nothing left to do.
- A window that a stable number of workers arrived at is remembered under that number, and taken up again when the
  number comes back: after a loss the rule need not be learned anew.
- More remote workers than it takes to generate everything while the trainer trains are no use: that is the target.
  A step whose window outlasted what it was given, for want of remote workers that served it, says nothing of it.

Without any remote worker the window has no end: that is plain colocation. All pure; a step's figures in, rules out.

Beyond the paper: where steps overlap, local engines fill the places that a step's tail leaves with samples of the next
one, so a window costs the trainer's time and nothing else, and the next step begins with samples that are done. So what
was over early, as all of the step was generated, says that the window was long enough, not that it should be shorter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class OffloadRules:
    """These do not change from step to step. The paper prints none of the numbers; these are its code's."""

    local_engines: int
    """N_resv: rollout engines on the trainer's machines."""
    first_s: float = 150.0
    """T_init: the window of the first step."""
    damping: float = 3.0
    """eta: the window changes by the imbalance divided by this. Below 1 it would overshoot."""
    floor_s: float = 5.0
    """Seconds of the shortest window: shorter ones cost more in waking engines than they give."""
    overlapping: bool = False
    """Whether samples of the next step are generated beside those of this one."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step has measured this. Times are of one clock; a worker's are means over the workers."""

    remote_mean: float
    """n: remote workers, averaged over the step."""
    remote_next: int
    """n̂: remote workers alive just before the next step."""
    train_idle_s: float
    """w_train: time in which the trainer waited to fill a micro-batch, summed."""
    remote_idle_s: float
    """w_remote: time from a remote worker's last response to the end of the step."""
    train_s: float
    """t_train: time in which the trainer computed."""
    remote_s: float
    """t_remote: time in which a remote worker computed."""
    seed_s: float | None = None
    """T_seed that the step was given (``window_s``), if that is not what was decided before it."""
    lasted_s: float | None = None
    """Time for which local engines generated, if the window was over before ``seed_s``."""


@dataclass(frozen=True, slots=True)
class Offload:
    """It is decided for the next step, with what is known."""

    seed_s: float
    target: int
    """N_prem: remote workers are taken while there are fewer."""
    memory: Mapping[int, float] = field(default_factory=dict[int, float])
    """Windows by number of remote workers."""


def first(rules: OffloadRules) -> Offload:
    """What holds before the first step."""
    return Offload(rules.first_s, rules.local_engines)


def after_step(rules: OffloadRules, now: Offload, report: StepReport) -> Offload:
    """What the next step is to do."""
    if report.remote_mean <= 0:  # colocation: nothing was learned of remote workers
        return Offload(_recalled(now, report.remote_next, now.seed_s), now.target, now.memory)
    given_s, lasted_s = _given_s(now, report), _lasted_s(now, report)
    change_s = (report.train_idle_s - report.remote_idle_s) / rules.damping
    if rules.overlapping:
        seed_s = given_s + (min(0.0, change_s) if lasted_s < given_s else change_s)
    else:
        seed_s = lasted_s + change_s
    seed_s = max(rules.floor_s, seed_s)
    memory = dict(now.memory)
    if report.remote_mean == report.remote_next:
        memory[report.remote_next] = seed_s
    known = Offload(seed_s, _target(rules, now, report), memory)
    return Offload(_recalled(known, report.remote_next, seed_s), known.target, memory)


def window_s(rules: OffloadRules, now: Offload, remote: int) -> float:
    """How long the trainer's engines generate in a step that begins with ``remote`` workers.

    Who has come or gone since the last step was reported counts: the memory is asked for the number that is there.
    """
    return max(rules.floor_s, _recalled(now, remote, now.seed_s)) if remote else math.inf


def engine_s(rules: OffloadRules, now: Offload, report: StepReport) -> float:
    """t_remote n + T_seed N_resv: what all engines together took to generate the step; ``now``: decided before it."""
    return report.remote_s * report.remote_mean + _lasted_s(now, report) * rules.local_engines


def _target(rules: OffloadRules, now: Offload, report: StepReport) -> int:
    """N_prem = (t_remote n + T_seed N_resv) / t_train, rounded up: a machine cannot be had in part."""
    stood_in = _lasted_s(now, report) > _given_s(now, report)  # for workers that did not serve
    if report.train_s <= 0 or stood_in:
        return now.target
    return max(1, math.ceil(engine_s(rules, now, report) / report.train_s - 1e-9))


def _given_s(now: Offload, report: StepReport) -> float:
    return now.seed_s if report.seed_s is None else report.seed_s


def _lasted_s(now: Offload, report: StepReport) -> float:
    return _given_s(now, report) if report.lasted_s is None else report.lasted_s


def _recalled(now: Offload, remote: int, otherwise_s: float) -> float:
    return now.memory.get(remote, otherwise_s)
