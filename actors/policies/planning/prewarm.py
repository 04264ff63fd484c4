"""When workers have to be started or woken, so that they are ready as the next step's plan wants them.

    generation ends ──── the shortest time that it ever took until the next plan ────▶ plan
                              order ◀── buffer + what a start takes, as measured ──┘

RLHFless (arXiv 2602.22718) prewarms from the shortest past execution time plus a fixed buffer, whose value it does not
give. It takes the shortest so that a worker is too early rather than too late.

Pure: what was measured in, a time and a number out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class PrewarmView:
    """Holds what is known when the generation of a step has ended."""

    ended_s: float
    """Time at which the generation ended."""
    gaps_s: Sequence[float]
    """Seconds from the end of generation to the next plan, of past steps."""
    starts_s: Sequence[float]
    """Seconds that starting, or waking, took in the past."""
    buffer_s: float
    wanted: int
    """Workers that the next plan will probably want: as many as the last one did."""
    ready: int
    """Workers that are ready, or will be without an order."""


class Prewarm(NamedTuple):
    """Says when to order how many workers."""

    at_s: float
    workers: int


def decide(view: PrewarmView, now: float) -> Prewarm | None:
    """The order for the next step; None: nothing is to be started, or nothing has been measured to go by."""
    count = view.wanted - view.ready
    if count <= 0 or not view.gaps_s or not view.starts_s:
        return None
    lead_s = max(view.starts_s) + view.buffer_s
    return Prewarm(max(now, view.ended_s + min(view.gaps_s) - lead_s), count)
