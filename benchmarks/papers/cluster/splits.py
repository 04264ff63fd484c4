"""How many devices generate and how many train, before a job begins and as outputs lengthen.

StreamRL (arXiv 2504.15930), stage balancing, Algorithm 1: with P_gen(x) and P_train(y) the times of the two stages on x
and y of n devices, taken from profiles of the workload, the split whose slower stage is fastest,
argmin max(P_gen(x), P_train(y)).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

StageTime = Callable[[int], float]
"""Seconds of the stage by number of devices; ``inf`` where the model does not fit."""


@dataclass(frozen=True, slots=True)
class Split:
    """A split shares devices between the two stages."""

    rollout: int
    train: int
    iteration_s: float
    """Time of the slower stage."""


def one_centre(devices: int, gen_s: StageTime, train_s: StageTime, *, unit: int) -> Split:
    """The best split of ``devices``; both stages get whole units. Equal ones: that with fewer rollout devices."""
    options = [
        Split(x, devices - x, max(gen_s(x), train_s(devices - x))) for x in range(unit, devices - unit + 1, unit)
    ]  # a device that nobody uses makes nothing faster, so x + y = devices
    if not options:
        raise ValueError(f"two stages of at least {unit} devices each; found {devices} devices")
    return min(options, key=lambda split: (split.iteration_s, split.rollout))


def should_grow(measured_gen_s: float, measured_train_s: float, *, rollout: int, unit: int, gen_s: StageTime) -> bool:
    """Whether one more unit should generate: generation is behind by at least what the unit would gain."""
    gain_s = gen_s(rollout) - gen_s(rollout + unit)
    return gain_s > 0 and measured_gen_s - measured_train_s >= gain_s
