"""How many remote workers a step had, and how long each of them worked and had nothing left to do.

Sums over looks: what held at a look is taken to have held until the next one. Looks come with every sample that ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.fleet.workers import Worker


@dataclass(frozen=True, slots=True)
class RemoteFigures:
    """This is what the remote workers of a step did. Times in seconds, means over the workers."""

    mean: float
    """Number of workers, averaged over the step's time."""
    busy_s: float
    """Time in which a worker held samples."""
    idle_s: float
    """Time from a worker's last sample to the end of the step, over those that were there then."""


class RemoteTimes:
    """It adds up times from ``now`` on. ``look`` whenever something may have changed."""

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
