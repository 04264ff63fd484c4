"""Says how a run goes on: how far a phase is, how much time is left, how the reward changes. Pure.

progress maps ─▶ PhaseProgress ─▶ bar and rest (terminal) | a line for every tenth (pipe, ctl watch)
step rows ─────▶ seconds_left, trend
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

_TENTHS: Final = 10
TREND_STEPS: Final = 10
"""Number of first and of last steps that the trend compares: enough to even out the noise of single steps."""
_LEVEL: Final = 0.005
"""Change of the mean reward below which the trend is shown as level."""


class PhaseProgress:
    """Follows a long phase before the first step: ``update`` it with the progress maps that name a phase."""

    def __init__(self) -> None:
        self.name = ""
        self.done = self.total = 0
        self._unit = ""
        self._first: tuple[int, float] = (0, 0.0)
        self._rate_per_s = 0.0
        self._told_tenth = -1

    def update(self, progress: Mapping[str, Any], now_s: float) -> None:
        """Take in a map with the key ``phase``; an empty name ends the phase."""
        name, done = str(progress["phase"]), int(progress.get("phase_done", 0))
        if name != self.name:
            self.name, self._told_tenth, self._rate_per_s = name, -1, 0.0
            self._first = (done, now_s)
        self.done, self.total = done, int(progress.get("phase_total", 0))
        self._unit = str(progress.get("phase_unit", ""))
        if now_s > self._first[1]:
            self._rate_per_s = max(0.0, (done - self._first[0]) / (now_s - self._first[1]))

    def line(self) -> str | None:
        """A line for output that is not redrawn; None until a further tenth is done."""
        if not self.name or (tenth := _TENTHS * self.done // max(1, self.total)) <= self._told_tenth:
            return None
        self._told_tenth = tenth
        return f"{self.name}: {self.amount()}"

    def amount(self) -> str:
        """The amount done, such as ``300 of 900 steps``, ``1.20 of 3.00 GB``."""
        if self._unit != "bytes":
            return f"{self.done} of {self.total} {self._unit}"
        size, name, digits = (1e9, "GB", 2) if self.total >= 1e9 else (1e6, "MB", 1)
        return f"{self.done / size:.{digits}f} of {self.total / size:.{digits}f} {name}"

    def left(self) -> str:
        """The time left at the pace so far; empty while that is not known."""
        return duration((self.total - self.done) / self._rate_per_s) + " left" if self._rate_per_s > 0 else ""


def seconds_left(seconds: Sequence[float], step: int, steps: int) -> float | None:
    """Time for the steps after ``step``, each as long as the median of ``seconds``; None while there are none."""
    return statistics.median(seconds) * max(0, steps - step) if seconds else None


def duration(seconds: float) -> str:
    """A duration in words, such as ``40 s``, ``12 min``, ``3.5 h``, ``2.1 d``."""
    for size, name, least in ((86400, "d", 2 * 86400), (3600, "h", 2 * 3600)):
        if seconds >= least:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def trend(rewards: Sequence[float]) -> str:
    """The mean of the last ``rewards`` less that of the first, in words; empty while there are too few."""
    if len(rewards) < 2 * TREND_STEPS:
        return ""
    change = statistics.fmean(rewards[-TREND_STEPS:]) - statistics.fmean(rewards[:TREND_STEPS])
    arrow = "→" if abs(change) < _LEVEL else "↗" if change > 0 else "↘"
    return f"{arrow} {change:+.3f} in {len(rewards)} steps"
