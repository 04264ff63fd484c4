"""Spot traces for studies: how many machines they have, and other traces made of them.

    a recorded trace ─▶ kept (some of its machines) ─▶ shorter_lived ─▶ between (a part of it) ─▶ a run

Invariants
- Every function returns another trace and leaves its own as it was; a draw is fixed by its seed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from supervisors.providers.trace_files import HEADER
from supervisors.providers.traces import Trace, TraceEvent, in_order

# ------------------------------------------------------------ figures


def changes(trace: Trace) -> Iterator[tuple[float, int]]:
    """Instants at which nodes come or go, and how many are there from then on."""
    alive, moves = 0, (event for event in trace.events if event.what != "notice")
    for at_s, events in itertools.groupby(moves, key=lambda event: event.at_s):
        alive += sum(1 if event.what == "up" else -1 for event in events)
        yield at_s, alive


def nodes_max(trace: Trace) -> int:
    """The most nodes that are there at once."""
    return max((count for _, count in changes(trace)), default=0)


def nodes_mean(trace: Trace) -> float:
    """Nodes that are there, as a mean over the length of the trace."""
    total, alive, since_s = 0.0, 0, 0.0
    for at_s, count in (*changes(trace), (trace.length_s, 0)):
        total, alive, since_s = total + alive * (at_s - since_s), count, at_s
    return total / trace.length_s if trace.length_s else 0.0


def preemptions(trace: Trace) -> int:
    """Nodes that are killed."""
    return sum(event.what == "kill" for event in trace.events)


# ------------------------------------------------------------ other traces made of one


def between(trace: Trace, start_s: float, end_s: float) -> Trace:
    """The part between two times, counted from its own start; who is there at its start comes up with it."""
    alive: dict[str, TraceEvent] = {}
    inside: list[TraceEvent] = []
    for event in trace.events:
        if event.at_s < start_s:
            if event.what == "up":
                alive[event.node] = replace(event, at_s=0.0)
            elif event.what == "kill":
                alive.pop(event.node, None)
        elif event.at_s < end_s:
            inside.append(replace(event, at_s=event.at_s - start_s))
    return replace(trace, events=in_order([*alive.values(), *inside]), length_s=end_s - start_s)


def kept(trace: Trace, part: float, seed: int) -> Trace:
    """The trace with that part of the nodes, drawn; each keeps its history."""
    names = sorted({event.node for event in trace.events})
    chosen = set(random.Random(f"{seed}/kept nodes").sample(names, round(part * len(names))))
    return replace(trace, events=tuple(event for event in trace.events if event.node in chosen))


def shorter_lived(trace: Trace, times: int, seed: int) -> Trace:
    """As many machines at each instant, of which so many times as many are preempted.

    Each life is cut at ``times`` - 1 drawn instants, at which another machine, with a name of its own, takes over.
    """
    if times < 1:
        raise ValueError(f"lives are cut into {times} parts; expected at least 1")
    ends = {event.node: event.at_s for event in trace.events if event.what == "kill"}
    events = list(trace.events)
    for event in [event for event in trace.events if event.what == "up"]:
        rng = random.Random(f"{seed}/cuts/{event.node}")
        last_s = ends.get(event.node, trace.length_s)
        cuts = sorted(rng.uniform(event.at_s, last_s) for _ in range(times - 1))
        events = _cut(events, event, cuts)
    return replace(trace, events=in_order(events))


def _cut(events: list[TraceEvent], born: TraceEvent, cuts_s: list[float]) -> list[TraceEvent]:
    """One life as several: each part but the first has another name, and what came later happens to the last."""
    names = [born.node, *(f"{born.node}+{i}" for i in range(1, len(cuts_s) + 1))]

    def whose(event: TraceEvent) -> TraceEvent:
        if event.node != born.node or event.what == "up":
            return event
        return replace(event, node=names[sum(cut <= event.at_s for cut in cuts_s)])

    changed = [
        made
        for at_s, old, new in zip(cuts_s, names, names[1:], strict=False)
        for made in (replace(born, at_s=at_s, node=old, what="kill"), replace(born, at_s=at_s, node=new))
    ]
    return [whose(event) for event in events] + changed


# ------------------------------------------------------------ a file


def write_trace(trace: Trace, path: Path) -> None:
    """The trace in Headrace's own format."""
    rows = [f"{event.at_s:.10g},{event.node},{event.what},{event.kind}" for event in trace.events]
    path.write_text("\n".join([",".join(HEADER), *rows]) + "\n", encoding="utf-8")
