"""Spot traces: when machines came, were given notice, and went.

    trace_files.py: a file in one of three formats ─▶ Trace ─▶ replay.py, simulations, studies (benchmarks/papers)

Invariants
- Events are in order of time; at one instant machines leave before others come, as providers do it.
- A node comes up before it goes, goes once, and never comes again: a machine that returns has another name.
- A trace holds no randomness and no clock. A function that thins, cuts or speeds it up returns another trace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

What = Literal["up", "notice", "kill"]
SPOT: Final = "spot"
_ORDER: Final = {"notice": 0, "kill": 1, "up": 2}


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Holds one event of one machine."""

    at_s: float
    node: str
    what: What
    kind: str = SPOT
    """Price kind of the machine: a key of the price table."""


@dataclass(frozen=True)
class Trace:
    """The events of a spot trace, in order."""

    source: str
    events: tuple[TraceEvent, ...]
    length_s: float
    """Seconds that the trace covers; it says nothing of what comes later."""

    def kinds(self) -> dict[str, str]:
        """Node → its price kind."""
        return {event.node: event.kind for event in self.events}

    def windows(self) -> dict[str, float]:
        """Node → seconds from its notice to its end, for nodes that get a notice."""
        ends = {event.node: event.at_s for event in self.events if event.what == "kill"}
        told = (event for event in self.events if event.what == "notice")
        return {event.node: ends.get(event.node, self.length_s) - event.at_s for event in told}

    def faster(self, factor: float) -> Trace:
        """The same events in 1/factor of the time."""
        events = tuple(replace(event, at_s=event.at_s / factor) for event in self.events)
        return Trace(self.source, events, self.length_s / factor)

    def with_notice(self, notice_s: float) -> Trace:
        """Give each node killed without notice one, ``notice_s`` before, or when it came up if that is later."""
        ups = {event.node: event.at_s for event in self.events if event.what == "up"}
        told = {event.node for event in self.events if event.what == "notice"}
        added = [
            replace(event, at_s=max(ups[event.node], event.at_s - notice_s), what="notice")
            for event in self.events
            if event.what == "kill" and event.node not in told
        ]
        return Trace(self.source, in_order([*self.events, *added]), self.length_s)


def in_order(events: list[TraceEvent]) -> tuple[TraceEvent, ...]:
    """Events by time; at one instant, departures before others' arrivals, and a node's own in order of its life."""
    ups = {event.node: event.at_s for event in events if event.what == "up"}

    def rank(event: TraceEvent) -> tuple[float, int]:
        born_now = event.what != "up" and ups.get(event.node) == event.at_s
        return event.at_s, _ORDER[event.what] + (3 if born_now else 0)

    return tuple(sorted(events, key=rank))
