"""Notes on one step of a job with seeding windows: its window, its remote workers, and how the trainer waited.

    TO_OPEN ──workers may generate──▶ AWAITS_PROMPTS ──they are here───▶ OPEN ──its time, or an estimate──▶ OVER
       ▲                                    ▲                              │                                  │
       │                                    └───── no remote worker serves the step, or the trainer ran dry ──┤
       └── the trainer replays ── any state ──── nothing is left to generate ──▶ OVER, but TO_OPEN stays

Times of remote workers are sums over observations: the state at one is taken to last until the next. Each sample that
ends brings an observation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from actors.fleet.workers import Worker


class WindowState(Enum):
    """A step's window is in one of these states. Local workers are awake in ``AWAITS_PROMPTS`` and ``OPEN``."""

    TO_OPEN = "to open"
    """State before the first opening, which waits only until there is something to generate."""
    AWAITS_PROMPTS = "awaits prompts"
    """State of an open window whose time has not begun, since the step's prompts are not here yet."""
    OPEN = "open"
    OVER = "over"
    """State of an ended window; it opens again if local workers turn out to be needed."""

    @property
    def wakes(self) -> bool:
        """Whether local workers are to be awake."""
        return self in (WindowState.AWAITS_PROMPTS, WindowState.OPEN)


@dataclass(frozen=True, slots=True)
class RemoteFigures:
    """The figures say what a step's remote workers did. Times are in seconds, means over the workers."""

    mean: float
    """Number of workers, averaged over the step's time."""
    busy_s: float
    """Time in which a worker held samples."""
    idle_s: float
    """Time from a worker's last sample to the end of the step, over those that were there then."""


class RemoteTimes:
    """The remote workers' times are added up from ``now`` on. Call ``look`` whenever something may have changed."""

    def __init__(self, now: float) -> None:
        self._since_s = self._looked_s = now
        self._there: list[str] = []
        self._busy: set[str] = set()
        self._worker_s = self._busy_s = 0.0
        self._last_busy_s: dict[str, float] = {}

    def look(self, workers: Sequence[Worker], now: float) -> None:
        """Note the workers that are there now."""
        self._pass(now)
        self._there = [worker.name for worker in workers]
        self._busy = {worker.name for worker in workers if worker.in_flight}

    def figures(self, now: float) -> RemoteFigures:
        """The figures up to now."""
        self._pass(now)
        seconds = now - self._since_s
        mean = self._worker_s / seconds if seconds > 0 else float(len(self._there))
        mean = float(round(mean)) if abs(mean - round(mean)) < 1e-6 else mean
        idle = [now - self._last_busy_s.get(name, self._since_s) for name in self._there]
        return RemoteFigures(mean, self._busy_s / mean if mean else 0.0, sum(idle) / len(idle) if idle else 0.0)

    def _pass(self, now: float) -> None:
        seconds, self._looked_s = now - self._looked_s, now
        self._worker_s += seconds * len(self._there)
        self._busy_s += seconds * len(self._busy)
        self._last_busy_s |= dict.fromkeys(self._busy, now)


@dataclass(slots=True)
class SeedingStep:
    """The notes on the windows of one step. Times are of the loop's clock."""

    number: int
    remote: RemoteTimes
    window: WindowState = WindowState.TO_OPEN
    opened_s: float = 0.0
    """Time at which the open window's time began."""
    lasted_s: float = 0.0
    """Total seconds of its windows that have ended."""
    given_s: float = math.inf
    """Seconds that the learned length allowed the newest window, or that the estimate allowed all windows together."""
    asked_s: float | None = None
    """Time at which the trainer first wanted groups of this step."""
    allowed_s: float | None = None
    """Time at which the trainer could first have them."""
    held_before_s: float = 0.0
    """``held_s`` of the windows before the newest one that was opened again for a trainer with nothing to train."""

    @property
    def held_s(self) -> float:
        """Seconds the trainer was deliberately held back in this step."""
        if self.asked_s is None or self.allowed_s is None:
            return self.held_before_s
        return self.held_before_s + max(0.0, self.allowed_s - self.asked_s)

    def waits_again(self, now: float) -> None:
        """The trainer has nothing left to train, and the window opens again: it is held back on purpose from now on."""
        self.held_before_s, self.asked_s, self.allowed_s = self.held_s, now, None
