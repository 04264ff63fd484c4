"""Decides whose requests an engine computes now, of snapshots that it cannot compute side by side.

With an engine that holds adapters the base model and all adapters of it have one turn together, and each whole model
has its own; with any other engine every snapshot has its own. A turn goes by the number of the snapshot that it loads.

    turn of a snapshot:  load ─▶ its requests join the running batch ─▶ closed: no more of them ─▶ drained ─▶ next turn
                                          │                               ▲
                                          │  others wait beyond limit_s ──┘
                                          └─ nothing of it runs or waits, and others wait ─▶ next turn

- The next turn is that of the snapshot whose oldest request has waited longest.
- A turn is closed when the oldest request of another snapshot has waited for more than ``limit_s`` since it came, or
  since the turn began if that is later; but not before it has served something, be the limit ever so short.
- Nothing starves: whoever asks is served after at most one turn of each snapshot that has asked before, and a turn
  lasts ``limit_s`` and what then runs.

Pure: no clock, no I/O. Times are seconds on any one clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TurnView:
    """Describes an engine between two steps. Snapshots have numbers."""

    present: int
    """Snapshot whose weights the engine has."""
    began_s: float
    """Time at which its turn began."""
    runs: bool
    """Whether the engine computes anything."""
    has_served: bool
    """Whether it has computed anything in this turn."""
    asking: Mapping[int, float]
    """When the oldest waiting request of each turn came; turns that nothing waits for are not in it."""


@dataclass(frozen=True, slots=True)
class TurnChoice:
    """Says what to do now: begin the turn of ``load``, if it is not None; else whether requests may join."""

    load: int | None = None
    admits: bool = False


def next_turn(view: TurnView, limit_s: float, now_s: float) -> TurnChoice:
    """Choose the turn, or go on with it."""
    others = {snapshot: since_s for snapshot, since_s in view.asking.items() if snapshot != view.present}
    if not others:
        return TurnChoice(admits=True)
    oldest = min(others, key=lambda snapshot: (others[snapshot], snapshot))
    closed = view.has_served and now_s - max(others[oldest], view.began_s) > limit_s
    if not view.runs and (closed or view.present not in view.asking):
        return TurnChoice(load=oldest)
    return TurnChoice(admits=not closed)
