"""Spot traces: when machines came, were given notice, and went.

    trace_files.py       a file in one of three formats ─┐
    trace_generator.py   a market and a seed ────────────┴─▶ Trace ─▶ replay.py, simulations

Invariants
- Events are in order of time; at one instant machines go before others come, as providers do it.
- A node comes up before it goes, goes once, and never comes again: a machine that returns has another name.
- A trace holds no randomness and no clock. Whatever thins, cuts or speeds it up returns another trace.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

What = Literal["up", "notice", "kill"]
SPOT: Final = "spot"
_ORDER: Final = {"notice": 0, "kill": 1, "up": 2}


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """An event is one thing that happens to one machine."""

    at_s: float
    node: str
    what: What
    kind: str = SPOT
    """Kind that it is priced as: a key of the price table."""


@dataclass(frozen=True)
class Trace:
    """See the module's docstring."""

    source: str
    events: tuple[TraceEvent, ...]
    length_s: float
    """Length of the trace, which says nothing of what comes later."""

    # ------------------------------------------------------------ figures

    def changes(self) -> Iterator[tuple[float, int]]:
        """From when on how many nodes are there: one pair for each instant at which the number changes."""
        alive = 0
        for at_s, events in itertools.groupby(self._moves(), key=lambda event: event.at_s):
            alive += sum(1 if event.what == "up" else -1 for event in events)
            yield at_s, alive

    @property
    def nodes_max(self) -> int:
        return max((count for _, count in self.changes()), default=0)

    @property
    def nodes_mean(self) -> float:
        """Over the length of the trace."""
        total, alive, since_s = 0.0, 0, 0.0
        for at_s, count in (*self.changes(), (self.length_s, 0)):
            total, alive, since_s = total + alive * (at_s - since_s), count, at_s
        return total / self.length_s if self.length_s else 0.0

    @property
    def preemptions(self) -> int:
        return sum(event.what == "kill" for event in self.events)

    def kinds(self) -> dict[str, str]:
        """Node → its price kind."""
        return {event.node: event.kind for event in self.events}

    def windows(self) -> dict[str, float]:
        """Node → seconds from its notice to its end, of those that get one."""
        ends = {event.node: event.at_s for event in self.events if event.what == "kill"}
        told = (event for event in self.events if event.what == "notice")
        return {event.node: ends.get(event.node, self.length_s) - event.at_s for event in told}

    # ------------------------------------------------------------ other traces made of this one

    def between(self, start_s: float, end_s: float) -> Trace:
        """The part between, counted from its own start; who is there at its start comes up with it."""
        alive: dict[str, TraceEvent] = {}
        inside: list[TraceEvent] = []
        for event in self.events:
            if event.at_s < start_s:
                if event.what == "up":
                    alive[event.node] = replace(event, at_s=0.0)
                elif event.what == "kill":
                    alive.pop(event.node, None)
            elif event.at_s < end_s:
                inside.append(replace(event, at_s=event.at_s - start_s))
        return self._with([*alive.values(), *inside], end_s - start_s)

    def kept(self, part: float, seed: int) -> Trace:
        """With that part of the nodes, drawn; each keeps its history."""
        names = sorted({event.node for event in self.events})
        chosen = set(random.Random(f"{seed}/kept nodes").sample(names, round(part * len(names))))
        return self._with([event for event in self.events if event.node in chosen], self.length_s)

    def faster(self, factor: float) -> Trace:
        """The same in 1/factor of the time."""
        return self._with([replace(event, at_s=event.at_s / factor) for event in self.events], self.length_s / factor)

    def shorter_lived(self, times: int, seed: int) -> Trace:
        """As many machines at each instant, of which so many times as many are preempted.

        Each life is cut at ``times`` - 1 drawn instants, at which another machine, with a name of its own, takes over.
        """
        if times < 1:
            raise ValueError(f"lives are cut into {times} parts; expected at least 1")
        ends = {event.node: event.at_s for event in self.events if event.what == "kill"}
        events = list(self.events)
        for event in [event for event in self.events if event.what == "up"]:
            rng = random.Random(f"{seed}/cuts/{event.node}")
            last_s = ends.get(event.node, self.length_s)
            cuts = sorted(rng.uniform(event.at_s, last_s) for _ in range(times - 1))
            events = _cut(events, event, cuts)
        return self._with(events, self.length_s)

    def with_notice(self, notice_s: float) -> Trace:
        """Whoever is killed without notice is given one, so long before, or when it came up if that is later."""
        ups = {event.node: event.at_s for event in self.events if event.what == "up"}
        told = {event.node for event in self.events if event.what == "notice"}
        added = [
            replace(event, at_s=max(ups[event.node], event.at_s - notice_s), what="notice")
            for event in self.events
            if event.what == "kill" and event.node not in told
        ]
        return self._with([*self.events, *added], self.length_s)

    def _with(self, events: list[TraceEvent], length_s: float) -> Trace:
        return Trace(self.source, in_order(events), length_s)

    def _moves(self) -> Iterator[TraceEvent]:
        return (event for event in self.events if event.what != "notice")


def _cut(events: list[TraceEvent], born: TraceEvent, cuts_s: list[float]) -> list[TraceEvent]:
    """One life as several: each part but the first has another name, and what came later happens to the last."""
    names = [born.node, *(f"{born.node}+{i}" for i in range(1, len(cuts_s) + 1))]

    def whose(event: TraceEvent) -> TraceEvent:
        if event.node != born.node or event.what == "up":
            return event
        return replace(event, node=names[sum(cut <= event.at_s for cut in cuts_s)])

    changes = [
        made
        for at_s, old, new in zip(cuts_s, names, names[1:], strict=False)
        for made in (replace(born, at_s=at_s, node=old, what="kill"), replace(born, at_s=at_s, node=new))
    ]
    return [whose(event) for event in events] + changes


def in_order(events: list[TraceEvent]) -> tuple[TraceEvent, ...]:
    """By time; a node's own events in the order of its life, and goings before comings of others."""
    ups = {event.node: event.at_s for event in events if event.what == "up"}

    def rank(event: TraceEvent) -> tuple[float, int]:
        born_now = event.what != "up" and ups.get(event.node) == event.at_s
        return event.at_s, _ORDER[event.what] + (3 if born_now else 0)

    return tuple(sorted(events, key=rank))
