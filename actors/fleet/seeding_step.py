"""What is noted of one step of a job with a seeding window: its windows, and what the trainer waited for them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from actors.fleet.remote_times import RemoteTimes


@dataclass(slots=True)
class SeedingStep:
    """Times are of the loop's clock."""

    number: int
    remote: RemoteTimes
    fresh: bool = True
    """Its window has yet to be opened, whoever else generates."""
    opened_s: float | None = None
    """Since when the window is open; None: it is not."""
    lasted_s: float = 0.0
    """All of its windows that are over."""
    given_s: float = math.inf
    """What the learned length gave the newest of them, or the estimate all of them."""
    asked_s: float | None = None
    """When the trainer wanted its groups first."""
    allowed_s: float | None = None
    """When it could have the first of them."""
    held_before_s: float = 0.0
    """``held_s`` of windows before the newest one that a dry trainer asked for."""

    @property
    def held_s(self) -> float:
        """For which the trainer waited because it was to, and for no other reason."""
        both = self.asked_s is not None and self.allowed_s is not None
        return self.held_before_s + (max(0.0, (self.allowed_s or 0.0) - (self.asked_s or 0.0)) if both else 0.0)

    def waits_again(self, now: float) -> None:
        """The trainer has run dry, and waits from now on because it is to."""
        self.held_before_s, self.asked_s, self.allowed_s = self.held_s, now, None
