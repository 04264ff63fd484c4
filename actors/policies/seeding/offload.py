"""How long the trainer's own engines generate before they hand over, and how many preemptible workers are worth having.

RLBoost (arXiv 2510.19225) section "adaptive rollout offload", Algorithm 1. In words:

- At the start of a step the trainer's machines generate too, for a window of ``seed_s``. Then they hand unfinished
  samples to remote workers, which go on after one prefill, and train on the finished ones. The window is a time and not
  a number of samples, since a number would wait for the longest of them.
- After each step the window grows by a fraction of the time in which the trainer waited for samples, and shrinks by the
  same fraction of the time in which remote workers had nothing left to do.
- A window that was learned with a stable number of workers is remembered under that number, and used again when the
  number comes back, so that it need not be learned again after a loss.
- The target is the number of remote workers that generate everything while the trainer trains; more would be useless.
  A step whose window lasted longer than planned, since no remote worker served it, does not change the target.

Without any remote worker the window has no end, which is plain colocation. All functions here are pure.

Beyond the paper: if steps overlap, local engines fill the places that a step's tail leaves with samples of the next
step, so a window costs only the trainer's time, and the next step begins with samples that are done. A window that
ended early, since all of the step was generated, then was long enough, and need not become shorter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class OffloadRules:
    """The rules do not change from step to step. The paper prints none of these numbers; they are from its code."""

    local_engines: int
    """N_resv: rollout engines on the trainer's machines."""
    first_s: float = 150.0
    """T_init: the window of the first step."""
    damping: float = 3.0
    """eta: the window changes by the imbalance divided by this. Below 1 it would overshoot."""
    floor_s: float = 5.0
    """Seconds of the shortest window: shorter ones cost more in waking engines than they give."""
    overlapping: bool = False
    """Whether samples of the next step are generated together with those of this one."""


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
    """T_seed that the step was given (``window_s``); None: the one that was decided before the step."""
    lasted_s: float | None = None
    """Time for which local engines generated; None: as long as the window was to be."""


@dataclass(frozen=True, slots=True)
class Offload:
    """A decision for the next step, with the memory for the steps after it."""

    seed_s: float
    target: int
    """N_prem: more remote workers are requested while there are fewer than this."""
    memory: Mapping[int, float] = field(default_factory=dict[int, float])
    """Windows by number of remote workers."""


def first(rules: OffloadRules) -> Offload:
    """The decision for the first step."""
    return Offload(rules.first_s, rules.local_engines)


def after_step(rules: OffloadRules, now: Offload, report: StepReport) -> Offload:
    """The decision for the step after the one that ``report`` describes."""
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

    The memory is asked for the present number of workers, whatever it was when the last step was reported.
    """
    return max(rules.floor_s, _recalled(now, remote, now.seed_s)) if remote else math.inf


def engine_s(rules: OffloadRules, now: Offload, report: StepReport) -> float:
    """t_remote n + T_seed N_resv: seconds of all engines for the step; ``now``: the decision before the step."""
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
