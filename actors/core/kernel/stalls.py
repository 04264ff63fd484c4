"""Who waits for whom, since when; and the counters that tell whether a process is well.

Invariants
- Reading these changes nothing, and costs what is open, not what has been.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from actors.core.kernel.blocking import threads_allowed

if TYPE_CHECKING:
    from actors.core.kernel.router import Router

_PROBE_S: Final = 0.05
_PROBES_KEPT: Final = 256


class Stall(msgspec.Struct, frozen=True):
    """One wait that has not ended."""

    waiter: str
    """The waiting actor; empty for code outside of actors."""
    waits_for: str
    """An address, a function on the actor's thread, or the handler's own await."""
    kind: str
    """ask, stream, credit, handler, blocking."""
    what: str
    """The tag of the message."""
    since_s: float
    """How long it has lasted."""

    def __str__(self) -> str:
        waiter = self.waiter or "outside"
        return f"{waiter} has waited {self.since_s:.3g} s for {self.waits_for} ({self.kind} {self.what})"


class SystemStats(msgspec.Struct, frozen=True):
    """A moment of one process."""

    counters: dict[str, int]
    actors: int
    mailbox_messages: dict[str, int]
    """By actor, those that hold any."""
    mailbox_messages_max: int
    pending_asks: int
    oldest_ask_s: float
    oldest_ask: str
    streams: int
    watches_held: int
    watches_on: int
    loop_lag_s: float
    loop_lag_max_s: float
    dead_letters: dict[str, int]


class Lag(msgspec.Struct, frozen=True):
    """How late the loop has been over the last probes, some ten seconds."""

    p50_s: float
    p99_s: float
    max_s: float


class LoopLag:
    """How late the loop comes to its timers.

    Off under virtual time: there is no lag, and a timer without end would hide a deadlock.
    """

    def __init__(self) -> None:
        self._probes: deque[float] = deque(maxlen=_PROBES_KEPT)
        self._timer: asyncio.TimerHandle | None = None
        self.warnings = 0

    def start(self, warn_s: float) -> None:
        """Begin to probe on the running loop."""
        loop = asyncio.get_running_loop()
        if threads_allowed(loop):
            self._schedule(loop, warn_s)

    def _schedule(self, loop: asyncio.AbstractEventLoop, warn_s: float) -> None:
        due = loop.time() + _PROBE_S

        def probe() -> None:
            lag_s = max(0.0, loop.time() - due)
            self._probes.append(lag_s)
            self.warnings += lag_s >= warn_s
            self._schedule(loop, warn_s)

        self._timer = loop.call_at(due, probe)

    def stop(self) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def last_s(self) -> float:
        return self._probes[-1] if self._probes else 0.0

    def over_last_probes(self) -> Lag | None:
        """None where nothing is probed, or has been yet."""
        ordered = sorted(self._probes)
        if not ordered:
            return None
        return Lag(ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100], ordered[-1])

    @property
    def max_s(self) -> float:
        """Over the last probes, some ten seconds."""
        return max(self._probes, default=0.0)


def stalls(router: Router, *, longer_than_s: float = 0.0) -> list[Stall]:
    """Every wait of this process that has lasted longer, longest first."""
    now = router.now()
    found: list[Stall] = []
    for waiter in router.requests:
        kind = "stream" if waiter.is_stream else "ask"
        found.append(Stall(waiter.asker, str(waiter.target), kind, waiter.question, now - waiter.since))
    for caller, producer in router.streams.producers.items():
        if producer.starved:
            found.append(Stall("", f"{caller.peer}", "credit", producer.delivery.tag, now - producer.starved_since))
    for name, cell in router.cells.items():
        for delivery in cell.working:
            waits_for, kind = "its own handler", "handler"
            if cell.blocking.running:
                waits_for, kind = cell.blocking.running, "blocking"
            found.append(Stall(name, waits_for, kind, delivery.tag, now - delivery.since))
    found = [stall for stall in found if stall.since_s >= longer_than_s]
    return sorted(found, key=lambda stall: -stall.since_s)


def stats(router: Router) -> SystemStats:
    """Counters and depths of this process."""
    lag = router.lag
    oldest = router.requests.oldest()
    held, on_us = router.deaths.watches.counts()
    counters = dict(router.counters + router.links.counters)
    counters["late_replies"] = router.requests.late_replies
    counters["deadlines_exceeded"] = router.requests.deadlines_exceeded
    counters["repeats_answered"] = router.results.hits
    counters["handled"] = router.handled
    counters["loop_lag_warnings"] = lag.warnings
    return SystemStats(
        counters=counters,
        actors=len(router.cells),
        mailbox_messages={name: len(cell.mailbox) for name, cell in router.cells.items() if len(cell.mailbox)},
        mailbox_messages_max=max((cell.mailbox.depth_max for cell in router.cells.values()), default=0),
        pending_asks=len(router.requests),
        oldest_ask_s=0.0 if oldest is None else router.now() - oldest.since,
        oldest_ask="" if oldest is None else f"{oldest.asker or 'outside'} asks {oldest.target}: {oldest.question}",
        streams=len(router.streams.producers),
        watches_held=held,
        watches_on=on_us,
        loop_lag_s=lag.last_s,
        loop_lag_max_s=lag.max_s,
        dead_letters=dict(router.dead_letters.counts),
    )
