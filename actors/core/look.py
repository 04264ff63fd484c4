"""A snapshot of one process: which actor waits for what, which messages found no receiver, how late the loop is.

    Look ─▶ an actor of that process that is never busy for long (reporter, node agent) ─▶ Sight

Invariants
- Looking changes nothing, and its cost grows with the number of open waits.
- Times are durations by the clock of the process itself, so those of several processes can be compared in one table.
"""

from __future__ import annotations

import msgspec

from actors.core.kernel.dead_letters import DeadLetter
from actors.core.kernel.loop_lag import Lag
from actors.core.kernel.port import Port
from actors.core.message import Message, message


class Stall(msgspec.Struct, frozen=True):
    """One wait that has not ended."""

    waiter: str
    """The waiting actor; empty for code outside of actors."""
    waits_for: str
    """An address, a function on the actor's thread, or the handler's own await."""
    kind: str
    """Kind of wait: ask, stream, credit, handler or blocking."""
    what: str
    """The tag of the message."""
    since_s: float
    """Seconds that it has lasted."""

    def __str__(self) -> str:
        waiter = self.waiter or "outside"
        return f"{waiter} has waited {self.since_s:.3g} s for {self.waits_for} ({self.kind} {self.what})"


@message("core.look")
class Look(Message):
    """The sender asks which waits are open in a process. Reply: Sight."""

    longer_than_s: float = 0.0
    """Seconds: waits that have lasted less are left out."""


@message("core.sight")
class Sight(Message):
    """A Sight answers Look with the open waits of one process, its dead letters, and the lag of its loop."""

    process: str
    stalls: list[Stall]
    """Waits, longest first."""
    dead_letters: list[DeadLetter]
    """Dead letters, newest first, as many as are kept."""
    dead_letter_counts: dict[str, int]
    """Counts of dead letters by reason, since the process began."""
    loop_lag: Lag | None = None
    """Lag of the event loop; None where it is not probed, as under virtual time."""


def _stalls(port: Port, longer_than_s: float) -> list[Stall]:
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


def sight(port: Port, longer_than_s: float, *, but: object = None) -> Sight:
    """The snapshot of this process. ``but``: tag of the message that asks for it, whose own handler is left out."""
    found = [stall for stall in _stalls(port, longer_than_s) if stall.what != but]
    return Sight(
        process=port.own.name,
        stalls=found,
        dead_letters=port.dead_letters.newest(port.now()),
        dead_letter_counts=dict(port.dead_letters.counts),
        loop_lag=port.lag.over_last_probes(),
    )
