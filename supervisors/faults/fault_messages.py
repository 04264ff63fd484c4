"""Messages of a nemesis to the processes of a run: faults that only the process itself, or its parent, can commit.

nemesis ──ApplyFault──▶ reporter of a role process ─▶ ProcessFaults: its links, its wall clock, its memory
        ──ApplyFault──▶ ┐
        ──SignalChild─▶ ├─ NodeFaults, beside each node agent: itself, and the processes that are its children
        ──SlowChild───▶ │
        ──SignalNode──▶ ┘
"""

from __future__ import annotations

import msgspec

from actors.core.message import Message, message


class LinkOrder(msgspec.Struct, frozen=True, kw_only=True, tag="link"):
    """Misbehave on links, as ``transport.link_faults.LinkRule``."""

    kind: str
    """The kind: partition, drop, delay, duplicate or corrupt."""
    peers: tuple[str, ...] = ()
    """The names of the peers at the other end; empty: all."""
    lane: str = ""
    """The lane: signal, message or bulk; empty: all."""
    probability: float = 1.0
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    lasts_s: float | None = None


class ClockOrder(msgspec.Struct, frozen=True, kw_only=True, tag="clock"):
    """Shift the wall clock that the process sees."""

    jump_s: float
    lasts_s: float | None = None


class MemoryOrder(msgspec.Struct, frozen=True, kw_only=True, tag="memory"):
    """Let the next micro-batch of several samples find no memory."""


ProcessOrder = LinkOrder | ClockOrder | MemoryOrder


@message("faults.apply")
class ApplyFault(Message):
    """Ask: commit ``order`` on the receiver's process. Answered with FaultApplied, or the error FaultNotPossible."""

    order: ProcessOrder


@message("faults.applied")
class FaultApplied(Message):
    """Done. What a process does to itself takes effect a moment later, so that this answer is not hit by it."""


@message("faults.signal_child")
class SignalChild(Message):
    """Ask: send a raw signal to a process that this node has started. Answered as ApplyFault."""

    pid: int
    signal: int


@message("faults.slow_child")
class SlowChild(Message):
    """Ask: let a process run for 1/``factor`` of the time without it counting as hung. Answered as ApplyFault."""

    pid: int
    factor: float
    lasts_s: float | None = None


@message("faults.signal_node")
class SignalNode(Message):
    """Ask: send ``signal`` to the node's own process, a moment later. Answered as ApplyFault.

    SIGSTOP stops the node's role processes as well; all are continued after ``continue_after_s``.
    """

    signal: int
    continue_after_s: float | None = None
