"""How many devices generate and how many train, and when one more should generate.

StreamRL (arXiv 2504.15930), stage balancing, Algorithm 1. With P_gen(x) and P_train(y) the times of the two stages on x
and y devices, taken from profiles of the workload:

- **One data centre**, n devices: of all splits the one whose slower stage is fastest, argmin max(P_gen(x), P_train(y)).
- **Two data centres**, m devices for generation in one and n for training in the other: the slower side keeps all of
  its devices; the faster one keeps as many as bring it nearest to the slower, and gives the others back.
- **Growing** as outputs lengthen: after each iteration, the gap T_gen - T_train is held against what one more unit
  would take off T_gen, by the profile; once the gap is as large, the unit is added.

The paper only grows. ``resize`` shrinks too: it gives a unit back when generation would still not be the slower stage,
with a margin, so that a unit which jitter brought in is not asked for again at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

StageTime = Callable[[int], float]
"""Devices → seconds of the stage; ``inf`` where the model does not fit."""


@dataclass(frozen=True, slots=True)
class Split:
    """Devices of the two stages."""

    rollout: int
    train: int
    iteration_s: float
    """Of the slower stage."""


def one_centre(devices: int, gen_s: StageTime, train_s: StageTime, *, unit: int) -> Split:
    """The best split of ``devices``; both stages get whole units. Equal ones: that with fewer rollout devices."""
    options = [
        Split(x, devices - x, max(gen_s(x), train_s(devices - x))) for x in _counts(devices - unit, unit)
    ]  # a device that nobody uses makes nothing faster, so x + y = devices
    if not options:
        raise ValueError(f"two stages of at least {unit} devices each; found {devices} devices")
    return min(options, key=lambda split: (split.iteration_s, split.rollout))


def two_centres(rollout: int, train: int, gen_s: StageTime, train_s: StageTime, *, unit: int) -> Split:
    """What of ``rollout`` devices in one centre and ``train`` in the other is worth keeping."""
    slow_gen, slow_train = gen_s(rollout), train_s(train)
    if slow_gen < slow_train:
        kept = min(_counts(rollout, unit), key=lambda k: (abs(gen_s(k) - slow_train), k))
        return Split(kept, train, max(gen_s(kept), slow_train))
    kept = min(_counts(train, unit), key=lambda k: (abs(train_s(k) - slow_gen), k))
    return Split(rollout, kept, max(slow_gen, train_s(kept)))


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


def _counts(most: int, unit: int) -> Iterable[int]:
    return range(unit, most + 1, unit)
