"""Tells a hung process from a busy one. A pure state machine: evidence and time are handed in, a state comes out.

Invariants
- Two questions, two kinds of evidence. "Is it there?": its exit (seen by whoever owns the process) and the link's
  heartbeats (libzmq's own thread answers them while Python holds the GIL). "Does it make progress?": beacons from its
  event loop, with a long budget per role.
- Silence of the beacon alone never condemns a process within its budget: a long engine step and a held GIL are busy.
- A process seen stopped by a signal, or whose link has been lost for the grace, is hung: no network lies between us.
- ``gone`` is final.

    starting ──ready──▶ alive ◀──beacon── suspect ──grace over──▶ hung
        │                 └── link lost, stopped, half of the beacon budget used ──▶ suspect
        └── ready deadline over ──▶ hung                        exit, from any state ──▶ gone
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Health(enum.StrEnum):
    """The states that a process is believed to be in."""

    STARTING = "starting"
    ALIVE = "alive"
    SUSPECT = "suspect"
    """A sign of life is missing, but not for long enough."""
    HUNG = "hung"
    """The process is there, but will not go on: its owner kills it."""
    GONE = "gone"
    """Its exit was seen."""


@dataclass(frozen=True)
class DetectorLimits:
    """Seconds that each kind of silence may last."""

    ready_s: float
    """Time from start to ready."""
    link_grace_s: float
    """Time from the loss of the link (heartbeats have already been missing then) to the verdict."""
    stopped_grace_s: float
    """Time for which the process may be shown as stopped; a short stop by a debugger or job control is forgiven."""
    beacon_budget_s: float
    """Time from the last beacon to the verdict while the link lives; longer than the role's longest blocking step."""


class FailureDetector:
    """Weighs evidence about one process. Every method takes ``now_s`` of one monotonic clock."""

    def __init__(self, limits: DetectorLimits, now_s: float) -> None:
        self._limits = limits
        self._started_s = now_s
        self._ready = False
        self._gone = False
        self._beacon_s = now_s
        self._link_lost_s: float | None = None
        self._stopped_s: float | None = None

    def saw_ready(self, now_s: float) -> None:
        self._ready = True
        self.saw_beacon(now_s)

    def saw_beacon(self, now_s: float) -> None:
        """Note that its event loop turned, which clears every suspicion."""
        self._beacon_s = now_s
        self._link_lost_s = None
        self._stopped_s = None

    def saw_link_down(self, now_s: float) -> None:
        if self._link_lost_s is None:
            self._link_lost_s = now_s

    def saw_run_state(self, now_s: float, *, stopped: bool) -> None:
        """Note what the operating system shows: ``stopped`` is SIGSTOP's state, not sleep."""
        if not stopped:
            self._stopped_s = None
        elif self._stopped_s is None:
            self._stopped_s = now_s

    def saw_exit(self) -> None:
        self._gone = True

    def health(self, now_s: float) -> Health:
        """The verdict at ``now_s``."""
        if self._gone:
            return Health.GONE
        limits = self._limits
        if _over(self._stopped_s, limits.stopped_grace_s, now_s):
            return Health.HUNG
        if _over(self._link_lost_s, limits.link_grace_s, now_s):
            return Health.HUNG
        if not self._ready:
            return Health.HUNG if _over(self._started_s, limits.ready_s, now_s) else Health.STARTING
        if _over(self._beacon_s, limits.beacon_budget_s, now_s):
            return Health.HUNG
        silent = _over(self._beacon_s, limits.beacon_budget_s / 2, now_s)
        if silent or self._link_lost_s is not None or self._stopped_s is not None:
            return Health.SUSPECT
        return Health.ALIVE

    def why(self, now_s: float) -> str:
        """The evidence against it, for people."""
        parts: list[str] = []
        if self._stopped_s is not None:
            parts.append(f"stopped by a signal for {now_s - self._stopped_s:.1f} s")
        if self._link_lost_s is not None:
            parts.append(f"no heartbeat, link lost for {now_s - self._link_lost_s:.1f} s")
        if not self._ready:
            parts.append(f"not ready {now_s - self._started_s:.1f} s after its start")
        elif now_s - self._beacon_s > 2.0:
            parts.append(f"no progress beacon for {now_s - self._beacon_s:.1f} s")
        return "; ".join(parts)


def _over(since_s: float | None, allowed_s: float, now_s: float) -> bool:
    return since_s is not None and now_s - since_s >= allowed_s
