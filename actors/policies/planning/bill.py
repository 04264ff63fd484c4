"""What workers paid by the second cost: from the start order to the end, rounded up, and less while asleep.

    ordered ── starting ── awake ── asleep ── awake ── ended      one BilledLife, a worker's life
    └──────────────────── billed ─────────────────────┘           each life rounded up; asleep at a part of the price
                           └ works ┘         └ works ┘            compute only: RLHFless's bill (arXiv 2602.22718)

RLHFless counts devices times the seconds in which they decode: starting a worker, and keeping one warm, cost nothing
there. A provider's bill has both.

Pure: spans in, worker-seconds out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple


class BilledLife(NamedTuple):
    """Holds the times of one life of a worker, by which it is charged."""

    ordered_s: float
    """Time at which the worker's start was ordered, on the clock that ``ended_s`` is on."""
    ended_s: float
    asleep_s: float = 0.0
    """Seconds of this life in which the worker was asleep."""
    works_s: float = 0.0
    """Seconds of this life in which the worker decoded."""


_INSTANT: Final = 1e-9
"""Largest rounding error of floats, in seconds or in units; with a smaller ``rounding_s`` nothing is rounded up."""


@dataclass(frozen=True, slots=True)
class BillingRule:
    """Says how a life is charged; by default to its very end, with sleep at the full price."""

    rounding_s: float = 0.0
    """Seconds to a multiple of which each life is rounded up; 0: it is not."""
    asleep_price: float = 1.0
    """Price of an asleep second, as a part of that of one awake."""

    def rounded(self, seconds: float) -> float:
        """Seconds that are charged for a life of ``seconds``."""
        if self.rounding_s < _INSTANT:
            return seconds
        return math.ceil(seconds / self.rounding_s - _INSTANT) * self.rounding_s  # 3.0000000001 is no fourth second


def bill(spans: Iterable[BilledLife], rule: BillingRule) -> float:
    """Worker-seconds that are charged."""
    return sum(
        rule.rounded(span.ended_s - span.ordered_s) - (1.0 - rule.asleep_price) * span.asleep_s for span in spans
    )


def compute_only(spans: Iterable[BilledLife]) -> float:
    """Worker-seconds by the paper's bill: those in which something was decoded."""
    return sum(span.works_s for span in spans)
