"""What workers cost that are paid for by the second: from the start order to the end, rounded up, less while asleep.

    ordered ── starting ── awake ── asleep ── awake ── ended      one Span, a worker's life
    └──────────────────── billed ─────────────────────┘           each life rounded up; asleep at a part of the price
                           └ works ┘         └ works ┘            compute only: RLHFless's bill (arXiv 2602.22718)

RLHFless counts devices times the seconds in which they decode: what it takes to start a worker, and a warm one that
waits, cost nothing there. A provider's bill has both.

Pure: spans in, worker-seconds out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple


class Span(NamedTuple):
    """It is one life of a worker."""

    ordered_s: float
    """When its start was ordered, on the clock of the one who bills."""
    ended_s: float
    asleep_s: float = 0.0
    """Seconds of it in which the worker was asleep."""
    works_s: float = 0.0
    """Seconds of it in which the worker decoded."""


_INSTANT: Final = 1e-9
"""What rounding of floats may come to, in seconds or in units; a bill in smaller ones is one to the moment."""


@dataclass(frozen=True, slots=True)
class Rule:
    """It says what is charged; the default is a bill to the moment that charges for sleep in full."""

    rounding_s: float = 0.0
    """Each life is rounded up to a whole number of these; 0: not at all."""
    asleep_price: float = 1.0
    """Price of an asleep second, as a part of that of one awake."""

    def rounded(self, seconds: float) -> float:
        """What a life of so many seconds is charged as."""
        if self.rounding_s < _INSTANT:
            return seconds
        return math.ceil(seconds / self.rounding_s - _INSTANT) * self.rounding_s  # 3.0000000001 is no fourth second


def bill(spans: Iterable[Span], rule: Rule) -> float:
    """Worker-seconds that are charged."""
    return sum(
        rule.rounded(span.ended_s - span.ordered_s) - (1.0 - rule.asleep_price) * span.asleep_s for span in spans
    )


def compute_only(spans: Iterable[Span]) -> float:
    """Worker-seconds by the paper's bill: those in which something was decoded."""
    return sum(span.works_s for span in spans)
