"""Which functions a job gives back or gives up, and how many it orders.

    lacking   more are wanted, or will be at the next plan ─▶ cold ones are ordered
    ends      not ready in time · its machine does not come back to a head that was started again ─▶ given up
              has slept for ``idle_s``, and would not be ordered again at once ─▶ given back

- Below ``least`` none is given back; above ``most`` none is ordered.
- Without ``idle_s`` a function may sleep until its sleep has cost as much as a start: so the two together cost at most
  twice the least that was possible, however long it turns out not to be needed.
- Functions are ordered ahead of the next plan (``prewarm``), unless no plan comes, as the job is paused or over.

Pure: what is known of the functions and of the steps in, the names of those that end, and a number, out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from actors.policies.planning import prewarm
from actors.policies.planning.prewarm import PrewarmView


class FunctionFacts(Protocol):
    """Describes a function that is not cold, in its state since ``since_s``; ``joined``: this head saw its machine."""

    @property
    def node(self) -> str: ...
    @property
    def state(self) -> Literal["starting", "awake", "asleep"]: ...
    @property
    def since_s(self) -> float: ...
    @property
    def joined(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class FunctionRules:
    """Holds the rules that do not change during a run."""

    least: int
    most: int
    join_s: float
    """Seconds from its order within which a machine has to join."""
    start_s: float
    """Seconds from its order within which a worker has to be ready on a machine that has joined."""
    idle_s: float | None
    asleep_price: float
    """Price of a function that sleeps, as a part of that of one that works."""
    prewarm_buffer_s: float


@dataclass(frozen=True, slots=True)
class FunctionsView:
    """Holds what is known of a job's functions, and of the steps by which they are wanted."""

    there: Sequence[FunctionFacts]
    want: int
    """Functions that are to be starting or awake now."""
    planned: int
    """Functions that the newest plan wanted."""
    ended_s: float | None
    """Time at which the generation of the newest step ended; None: it has not."""
    gaps_s: Sequence[float]
    """Times from the end of generation to the next plan."""
    starts_s: Sequence[float]
    """Times from order to ready worker."""
    adopted_until_s: float
    """Time by which machines that a former life of the head ordered have to be back."""


class FunctionEnd(NamedTuple):
    """Names a function that is given back, or given up."""

    node: str
    why: str
    missed: bool
    """Whether the function was wanted, and has failed."""


def ends(rules: FunctionRules, view: FunctionsView, now: float) -> list[FunctionEnd]:
    """Functions to end now."""
    found: list[FunctionEnd] = []
    idle_s = _idle_s(rules, view)
    for function in view.there:
        ready = function.state != "starting"
        if now >= _deadline_s(rules, view, function):
            found.append(FunctionEnd(function.node, "is lost" if ready else "is not ready in time", missed=True))
        elif function.state == "asleep" and now - function.since_s >= idle_s:
            there = len(view.there) - len(found) - 1
            if there >= rules.least and not _prewarmed(rules, view, there, now):  # else it would be ordered again
                found.append(FunctionEnd(function.node, "idle", missed=False))
    return found


def lacking(rules: FunctionRules, view: FunctionsView, now: float) -> int:
    """Functions to order now."""
    there, busy = len(view.there), sum(function.state != "asleep" for function in view.there)
    count = max(view.want - busy, rules.least - there, _prewarmed(rules, view, there, now))
    return max(0, min(count, rules.most - there))


def _deadline_s(rules: FunctionRules, view: FunctionsView, function: FunctionFacts) -> float:
    """When a function is given up: its machine has to be here by then, or its worker ready."""
    ready, join_s = function.state != "starting", function.since_s + rules.join_s
    if not function.joined:
        return view.adopted_until_s if ready else max(view.adopted_until_s, join_s)
    return math.inf if ready else function.since_s + rules.start_s


def _idle_s(rules: FunctionRules, view: FunctionsView) -> float:
    """Time for which a function may sleep."""
    if rules.idle_s is not None:
        return rules.idle_s
    return statistics.mean(view.starts_s) / rules.asleep_price if rules.asleep_price and view.starts_s else math.inf


def _prewarmed(rules: FunctionRules, view: FunctionsView, there: int, now: float) -> int:
    """Functions to order now, beside ``there``, so that they are ready as the next step is planned."""
    if view.ended_s is None:
        return 0
    late_s = now - view.ended_s - max(view.gaps_s, default=0.0)
    if late_s > _idle_s(rules, view):  # no step is planned, as in a job that is paused
        return 0
    order = prewarm.decide(
        PrewarmView(view.ended_s, view.gaps_s, view.starts_s, rules.prewarm_buffer_s, view.planned, there), now
    )
    return order.workers if order is not None and order.at_s <= now else 0
