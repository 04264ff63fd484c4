"""How many machines that come and go are worth their price.

RLBoost's capacity target (``offload``) asks for as many as generate everything while the trainer trains, rounded up,
whatever a machine costs. Here, in words: with n of them a step takes as long as its slower stage,

    T(n) = max(training, (generation + L · training) / (L + n))        L engines on the machines that train

since an engine there either generates or is asleep while its machine trains; it costs T(n) · (reserved + n · price).
Take the n that makes a step cheapest; of equal ones the larger, which is faster. What is measured differs from step to
step, and a machine that goes has to boot when it is wanted again: so some steps in a row must do with fewer before
there are fewer.

Pure: measured seconds and prices in, a number out.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

STEPS: Final = 3
"""Steps in a row that must do with fewer machines before there are fewer."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """A step has measured this; prices are in one unit for the same time."""

    generate_s: float
    """Engine seconds, of all engines together."""
    train_s: float
    local_engines: int
    reserved_price: float
    """Price of all machines that stay."""
    machine_price: float
    """Price of one more."""

    def seconds(self, machines: int) -> float:
        engines = self.local_engines + machines
        if not engines:
            return float("inf")
        return max(self.train_s, (self.generate_s + self.local_engines * self.train_s) / engines)

    def useful(self) -> int:
        """Machines beyond which a step that trains is no shorter."""
        return math.ceil(self.generate_s / self.train_s)

    def price(self, machines: int) -> float:
        """Price of a step; one that never ends has none, even if machines cost nothing."""
        seconds = self.seconds(machines)
        if math.isinf(seconds):
            return seconds
        return seconds * (self.reserved_price + machines * self.machine_price)


def decide(step: StepCost, most: int) -> int:
    """Machines to have, from 0 to ``most``."""
    return min(range(most + 1), key=lambda n: (step.price(n), -n))


def settled(decided: Collection[int]) -> int | None:
    """Machines to have, by what each of the last ``STEPS`` steps decided. None while these are too few: all of them."""
    return max(decided) if len(decided) == STEPS else None
