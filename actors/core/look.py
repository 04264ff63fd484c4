"""One look into one process: who waits in it for whom, what found no receiver there, and how late its loop is.

    Look ─▶ an actor of that process that is never busy for long (envoy, node agent) ─▶ Sight

Invariants
- Looking changes nothing, and costs what is open.
- Times are ages by the clock of the process itself, so that those of several processes can stand in one table.
"""

from __future__ import annotations

from actors.core.kernel.dead_letters import DeadLetter
from actors.core.kernel.loop_lag import Lag
from actors.core.kernel.port import Port
from actors.core.kernel.stalls import Stall, stalls
from actors.core.message import Message, message


@message("core.look")
class Look(Message):
    """Ask; answered with Sight."""

    longer_than_s: float = 0.0
    """Waits that have lasted less are left out."""


@message("core.sight")
class Sight(Message):
    process: str
    stalls: list[Stall]
    """Longest first."""
    dead_letters: list[DeadLetter]
    """Newest first, as many as are kept."""
    dead_letter_counts: dict[str, int]
    """By reason, since the process began."""
    loop_lag: Lag | None = None
    """None where it is not probed, as under virtual time."""


def sight(port: Port, longer_than_s: float, *, but: object = None) -> Sight:
    """What is to be seen in this process. ``but``: the message that asks for it, whose own handler is no wait."""
    found = [stall for stall in stalls(port, longer_than_s=longer_than_s) if stall.what != but]
    return Sight(
        process=port.own.name,
        stalls=found,
        dead_letters=port.dead_letters.newest(port.now()),
        dead_letter_counts=dict(port.dead_letters.counts),
        loop_lag=port.lag.over_last_probes(),
    )
