"""Spot traces of our own: a market, and a seed that fixes every event.

    slot      absent ── exp(absent_mean_s) ──▶ up ── exp(life_mean_s) ──▶ kill ──▶ absent …       each on its own
    market    every exp(crunch_every_s): each node that is up goes at once with probability crunch_part,
              and nobody comes for exp(crunch_mean_s)

Machines are lost one by one and in crunches: real traces show both.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from supervisors.providers.traces import SPOT, Trace, TraceEvent, in_order


@dataclass(frozen=True)
class Market:
    """Traces are drawn from a market. By default lives are like those of the Bamboo project's traces: about an hour."""

    nodes_max: int = 8
    """Most nodes at once."""
    life_mean_s: float = 5400.0
    absent_mean_s: float = 1800.0
    """Time from the end of one machine of a slot until there is capacity for the next."""
    crunch_every_s: float = 10800.0
    """Time between crunches; ``math.inf``: there are none."""
    crunch_part: float = 0.6
    crunch_mean_s: float = 900.0
    notice_s: float = 30.0
    """Length of the notice before each end; 0: none is given."""
    kind: str = SPOT

    def __post_init__(self) -> None:
        times = (self.life_mean_s, self.absent_mean_s, self.crunch_every_s, self.crunch_mean_s)
        if self.nodes_max < 1 or min(times) <= 0 or not 0 <= self.crunch_part <= 1 or self.notice_s < 0:
            raise ValueError(f"a market has nodes, times above 0 and parts between 0 and 1; found {self}")


def generate(market: Market, length_s: float, seed: int) -> Trace:
    """A trace of ``length_s``."""
    rng = random.Random(f"{seed}/crunches")
    crunches, at_s = list[tuple[float, float]](), _exponential(rng, market.crunch_every_s)
    while at_s < length_s:
        crunches.append((at_s, at_s + _exponential(rng, market.crunch_mean_s)))
        at_s = crunches[-1][1] + _exponential(rng, market.crunch_every_s)
    events = [event for slot in range(market.nodes_max) for event in _lives(market, length_s, crunches, seed, slot)]
    trace = Trace(f"generated, seed {seed}", in_order(events), length_s)
    return trace.with_notice(market.notice_s) if market.notice_s else trace


def _lives(
    market: Market, length_s: float, crunches: list[tuple[float, float]], seed: int, slot: int
) -> list[TraceEvent]:
    rng = random.Random(f"{seed}/slot {slot}")
    events, now_s, life = list[TraceEvent](), _exponential(rng, market.absent_mean_s), 0
    while True:
        up_s = next((end_s for begin_s, end_s in crunches if begin_s <= now_s < end_s), now_s)
        if up_s >= length_s:
            return events
        life += 1
        name = f"{market.kind}-{slot}.{life}"
        ends = [up_s + _exponential(rng, market.life_mean_s)]
        ends += [begin_s for begin_s, _ in crunches if begin_s > up_s and rng.random() < market.crunch_part]
        events.append(TraceEvent(up_s, name, "up", market.kind))
        if min(ends) >= length_s:
            return events
        events.append(TraceEvent(min(ends), name, "kill", market.kind))
        now_s = min(ends) + _exponential(rng, market.absent_mean_s)


def _exponential(rng: random.Random, mean: float) -> float:
    return rng.expovariate(1 / mean) if math.isfinite(mean) else math.inf
