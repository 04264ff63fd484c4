"""What a nemesis says to the processes of a run: faults that only the process itself, or its parent, can commit.

nemesis ──ApplyFault──▶ envoy of a role process ─▶ ProcessFaults: its links, its wall clock
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
    """partition, drop, delay, duplicate, corrupt."""
    peers: tuple[str, ...] = ()
    """Names of the peers at the other end; empty: all."""
    lane: str = ""
    """signal, message, bulk; empty: all."""
    probability: float = 1.0
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    lasts_s: float | None = None


class ClockOrder(msgspec.Struct, frozen=True, kw_only=True, tag="clock"):
    """Shift the wall clock that the process sees."""

    jump_s: float
    lasts_s: float | None = None


ProcessOrder = LinkOrder | ClockOrder


@message("faults.apply")
class ApplyFault(Message):
    """Ask: commit it on your own process. Answered with FaultApplied, or with FaultNotPossible as the error."""

    order: ProcessOrder


@message("faults.applied")
class FaultApplied(Message):
    """What a process does to itself takes effect a moment later, so that this answer does not fall victim to it."""


@message("faults.signal_child")
class SignalChild(Message):
    """Ask: a raw signal to a process that this node has started. Answered as ApplyFault."""

    pid: int
    signal: int


@message("faults.slow_child")
class SlowChild(Message):
    """Ask: let it run one part in ``factor`` of the time, without being taken for hung. Answered as ApplyFault."""

    pid: int
    factor: float
    lasts_s: float | None = None


@message("faults.signal_node")
class SignalNode(Message):
    """Ask: the node's own process gets ``signal`` a moment later; if it stops it, its processes are stopped as well,

    and all are continued after ``continue_after_s``. Answered as ApplyFault.
    """

    signal: int
    continue_after_s: float | None = None
