"""Measures how late the event loop of a process runs its timers."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

import msgspec

from actors.core.kernel.blocking import threads_allowed

_PROBE_S: Final = 0.05
_PROBES_KEPT: Final = 256


class Lag(msgspec.Struct, frozen=True):
    """The loop was late by this much over the last probes, of some ten seconds."""

    p50_s: float
    p99_s: float
    max_s: float


class LoopLag:
    """A probe every 50 ms measures how late the loop runs its timers.

    No probe runs under virtual time: there is no lag, and an endless timer would hide a deadlock.
    """

    def __init__(self) -> None:
        self._probes: deque[float] = deque(maxlen=_PROBES_KEPT)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        if threads_allowed(loop):
            self._schedule(loop)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + _PROBE_S

        def probe() -> None:
            self._probes.append(max(0.0, loop.time() - due))
            self._schedule(loop)

        self._timer = loop.call_at(due, probe)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def over_last_probes(self) -> Lag | None:
        """The lag over the last probes; None where nothing is probed, or nothing yet."""
        ordered = sorted(self._probes)
        if not ordered:
            return None
        return Lag(ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100], ordered[-1])
