"""The seeding window's capacity target (N_prem) in a live job: no more remote workers than the trainer has use for.

    row of a step ─▶ seeding_target ─▶ the greatest of the last few ─▶ aim: pool and provider

Invariants
- It begins with all that come: what is too much is known after the first step.
- One step that would do with fewer workers ends none: a target is a quotient of measured times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

STEPS: Final = 3
"""So many steps in a row must do with fewer workers before there are fewer."""


class CapacityTarget:
    """Of one job with ``scheduling.seeding`` on machines that come and go. ``aim``: at most so many remote workers."""

    def __init__(self, aim: Callable[[int], None], record: Callable[..., None]) -> None:
        self._aim = aim
        self._record = record
        self._targets: deque[int] = deque(maxlen=STEPS)
        self._most: int | None = None

    def hear(self, row: Mapping[str, Any]) -> None:
        """What the job says; rows of steps are what counts."""
        if "seeding_target" not in row:
            return
        self._targets.append(int(row["seeding_target"]))
        if len(self._targets) < STEPS or (most := max(self._targets)) == self._most:
            return
        self._record("capacity_target", step=int(row["step"]), remote_workers=most)
        self._most = most
        self._aim(most)
