"""How many machines that come and go are worth their price.

RLBoost's capacity target (``offload``) asks for as many machines as generate everything while the trainer trains,
rounded up, whatever a machine costs. This rule looks at the price: with n of them a step takes as long as its slower
stage,

    T(n) = max(training, (generation + L · training) / (L + n))        L engines on the machines that train

since an engine there either generates or sleeps while its machine trains. The step costs T(n) · (reserved + n · price).
The rule takes the n for which a step is cheapest, and of equal ones the largest, which is fastest. Measurements vary
from step to step, and a machine that was given back has to boot when it is needed again. So machines are given back
only after ``STEPS`` steps in a row that each need fewer.

All functions here are pure: measured seconds and prices in, a number out.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

STEPS: Final = 3
"""Number of steps in a row that must each need fewer machines before some are given back."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """A step has measured this; prices are in one unit for the same time."""

    generate_s: float
    """Engine seconds of generation, summed over all engines."""
    train_s: float
    local_engines: int
    reserved_price: float
    """Price of all reserved machines."""
    machine_price: float
    """Price of one machine that comes and goes."""

    def seconds(self, machines: int) -> float:
        engines = self.local_engines + machines
        if not engines:
            return float("inf")
        return max(self.train_s, (self.generate_s + self.local_engines * self.train_s) / engines)

    def useful(self) -> int:
        """Number of machines beyond which a step becomes no shorter, since it trains for that long."""
        return math.ceil(self.generate_s / self.train_s)

    def price(self, machines: int) -> float:
        """Price of a step; infinite for a step that never ends, even if machines cost nothing."""
        seconds = self.seconds(machines)
        if math.isinf(seconds):
            return seconds
        return seconds * (self.reserved_price + machines * self.machine_price)


def decide(step: StepCost, most: int) -> int:
    """The best number of machines, from 0 to ``most``."""
    return min(range(most + 1), key=lambda n: (step.price(n), -n))


def settled(decided: Collection[int]) -> int | None:
    """The number of machines to keep after the last ``STEPS`` decisions; None while there are fewer: keep all."""
    return max(decided) if len(decided) == STEPS else None
