"""Who waits for whom, since when; and the counters that tell whether a process is well.

Invariants
- Reading these changes nothing, and costs what is open, not what has been.
"""

from __future__ import annotations

import msgspec

from actors.core.kernel.port import Port


class Stall(msgspec.Struct, frozen=True):
    """A stall is one wait that has not ended."""

    waiter: str
    """The waiting actor; empty for code outside of actors."""
    waits_for: str
    """An address, a function on the actor's thread, or the handler's own await."""
    kind: str
    """One of ask, stream, credit, handler, blocking."""
    what: str
    """The tag of the message."""
    since_s: float
    """Seconds that it has lasted."""

    def __str__(self) -> str:
        waiter = self.waiter or "outside"
        return f"{waiter} has waited {self.since_s:.3g} s for {self.waits_for} ({self.kind} {self.what})"


class SystemStats(msgspec.Struct, frozen=True):
    """The counters and depths of one process at one moment."""

    counters: dict[str, int]
    actors: int
    mailbox_messages: dict[str, int]
    """Messages by actor, for those that hold any."""
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


def stalls(port: Port, *, longer_than_s: float = 0.0) -> list[Stall]:
    """Every wait of this process that has lasted longer, longest first."""
    now = port.now()
    found: list[Stall] = []
    for waiter in port.requests:
        kind = "stream" if waiter.is_stream else "ask"
        found.append(Stall(waiter.asker, str(waiter.target), kind, waiter.question, now - waiter.since))
    for caller, producer in port.producers.items():
        if producer.starved:
            found.append(Stall("", f"{caller.peer}", "credit", producer.delivery.tag, now - producer.starved_since))
    for name, cell in port.cells.items():
        for delivery in cell.working:
            waits_for, kind = "its own handler", "handler"
            if cell.blocking.running:
                waits_for, kind = cell.blocking.running, "blocking"
            found.append(Stall(name, waits_for, kind, delivery.tag, now - delivery.since))
    found = [stall for stall in found if stall.since_s >= longer_than_s]
    return sorted(found, key=lambda stall: -stall.since_s)


def stats(port: Port) -> SystemStats:
    """Counters and depths of this process."""
    lag = port.lag
    oldest = port.requests.oldest()
    held, on_us = port.watches.counts()
    counters = dict(port.counters + port.links.counters)
    counters["late_replies"] = port.requests.late_replies
    counters["deadlines_exceeded"] = port.requests.deadlines_exceeded
    counters["handled"] = port.handled
    counters["loop_lag_warnings"] = lag.warnings
    return SystemStats(
        counters=counters,
        actors=len(port.cells),
        mailbox_messages={name: len(cell.mailbox) for name, cell in port.cells.items() if len(cell.mailbox)},
        mailbox_messages_max=max((cell.mailbox.depth_max for cell in port.cells.values()), default=0),
        pending_asks=len(port.requests),
        oldest_ask_s=0.0 if oldest is None else port.now() - oldest.since,
        oldest_ask="" if oldest is None else f"{oldest.asker or 'outside'} asks {oldest.target}: {oldest.question}",
        streams=len(port.producers),
        watches_held=held,
        watches_on=on_us,
        loop_lag_s=lag.last_s,
        loop_lag_max_s=lag.max_s,
        dead_letters=dict(port.dead_letters.counts),
    )
