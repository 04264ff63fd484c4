"""What is noted of one step of a job with a seeding window: its windows, and what the trainer waited for them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from actors.fleet.remote_times import RemoteTimes


@dataclass(slots=True)
class SeedingStep:
    """It notes the windows of one step. Times are of the loop's clock."""

    number: int
    remote: RemoteTimes
    fresh: bool = True
    """Whether its window has yet to be opened, whoever else generates."""
    opened_s: float | None = None
    """Time at which the open window was opened; None: it is not open."""
    lasted_s: float = 0.0
    """Seconds of all its windows that are over."""
    given_s: float = math.inf
    """Seconds that the learned length gave the newest window, or the estimate all of them."""
    asked_s: float | None = None
    """Time at which the trainer wanted its groups first."""
    allowed_s: float | None = None
    """Time at which it could have the first of them."""
    held_before_s: float = 0.0
    """``held_s`` of windows before the newest one that a trainer with nothing to train asked for."""

    @property
    def held_s(self) -> float:
        """Seconds the trainer was deliberately held back in this step."""
        both = self.asked_s is not None and self.allowed_s is not None
        return self.held_before_s + (max(0.0, (self.allowed_s or 0.0) - (self.asked_s or 0.0)) if both else 0.0)

    def waits_again(self, now: float) -> None:
        """The trainer has nothing left to train; from now on it is held back deliberately."""
        self.held_before_s, self.asked_s, self.allowed_s = self.held_s, now, None
