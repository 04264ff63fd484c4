"""When one more unit of devices should generate, and when one fewer.

StreamRL (arXiv 2504.15930), stage balancing, Algorithm 1, "growing" as outputs lengthen: after each iteration the gap
T_gen - T_train is held against what one more unit would take off T_gen, by a profile of the workload; once the gap is
as large, the unit is added.

The paper only grows. ``resize`` shrinks too: it gives a unit back when generation would still not be the slower stage,
with a margin, so that a unit which jitter brought in is not asked for again at once.
"""

from __future__ import annotations

from collections.abc import Callable

StageTime = Callable[[int], float]
"""Seconds of the stage by number of devices; ``inf`` where the model does not fit."""


def should_grow(measured_gen_s: float, measured_train_s: float, *, rollout: int, unit: int, gen_s: StageTime) -> bool:
    """The paper's rule: generation is behind by at least what one more unit would gain."""
    gain_s = gen_s(rollout) - gen_s(rollout + unit)
    return gain_s > 0 and measured_gen_s - measured_train_s >= gain_s


def resize(
    measured_gen_s: float,
    measured_train_s: float,
    *,
    rollout: int,
    unit: int,
    gen_s: StageTime,
    most: int,
    margin: float = 0.05,
) -> int:
    """How many devices should generate next: a unit more, as many, or a unit less."""
    if rollout + unit <= most and should_grow(
        measured_gen_s, measured_train_s, rollout=rollout, unit=unit, gen_s=gen_s
    ):
        return rollout + unit
    if rollout > unit:
        loss_s = gen_s(rollout - unit) - gen_s(rollout)
        if measured_gen_s + loss_s <= measured_train_s * (1 - margin):
            return rollout - unit
    return rollout
