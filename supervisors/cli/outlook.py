"""What is said of a run's further course: how far a phase is, how long the rest takes, where the reward goes. Pure.

progress maps ─▶ PhaseProgress ─▶ bar and rest (terminal) | a line for every tenth (pipe, ctl watch)
step rows ─────▶ seconds_left, trend
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

_TENTHS: Final = 10
TREND_STEPS: Final = 10
"""Steps at each end of what the trend compares: enough to even out the noise of single steps."""
_LEVEL: Final = 0.005
"""A change of the mean reward below this is called none."""


class PhaseProgress:
    """A phase is work before the first step that takes long: ``update`` it with the progress maps that name one."""

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
        """A line for whoever sees lines only; None until a further tenth is done."""
        if not self.name or (tenth := _TENTHS * self.done // max(1, self.total)) <= self._told_tenth:
            return None
        self._told_tenth = tenth
        return f"{self.name}: {self.amount()}"

    def amount(self) -> str:
        """Such as ``300 of 900 steps``, ``1.20 of 3.00 GB``."""
        if self._unit != "bytes":
            return f"{self.done} of {self.total} {self._unit}"
        size, name, digits = (1e9, "GB", 2) if self.total >= 1e9 else (1e6, "MB", 1)
        return f"{self.done / size:.{digits}f} of {self.total / size:.{digits}f} {name}"

    def left(self) -> str:
        """How long it will still take, at its pace so far; empty while that is not known."""
        return duration((self.total - self.done) / self._rate_per_s) + " left" if self._rate_per_s > 0 else ""


def seconds_left(seconds: Sequence[float], step: int, steps: int) -> float | None:
    """For the steps after ``step``, each as long as the median of the last ones; None while there are none."""
    return statistics.median(seconds) * max(0, steps - step) if seconds else None


def duration(seconds: float) -> str:
    """Such as ``40 s``, ``12 min``, ``3.5 h``, ``2.1 d``."""
    for size, name, least in ((86400, "d", 2 * 86400), (3600, "h", 2 * 3600)):
        if seconds >= least:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def trend(rewards: Sequence[float]) -> str:
    """Where the reward goes: the mean of the last steps beside that of the first ones of ``rewards``."""
    if len(rewards) < 2 * TREND_STEPS:
        return ""
    change = statistics.fmean(rewards[-TREND_STEPS:]) - statistics.fmean(rewards[:TREND_STEPS])
    arrow = "→" if abs(change) < _LEVEL else "↗" if change > 0 else "↘"
    return f"{arrow} {change:+.3f} in {len(rewards)} steps"
