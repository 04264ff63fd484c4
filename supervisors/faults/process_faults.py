"""Faults that a process commits on itself when it is told to: on its links, its memory, and the wall clock it sees."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Final

from actors.trainer import scarce_memory
from configs.limits import DEFAULT_LIMITS
from supervisors.faults.fault_messages import LinkOrder, MemoryOrder, ProcessOrder
from supervisors.tree.errors import FaultNotPossible
from transport.link_faults import FaultableTransport, LinkRule, Misbehaviour
from transport.transport import Lane, Transport

ANSWER_S: Final = 0.05
"""The time from an order to its effect: the answer to the order leaves first."""


AddRule = Callable[[LinkRule, float | None], object]
"""Callback that applies a rule to this process's links, for so many seconds or for good."""


class ProcessFaults:
    """Commits faults on this process. Without ``add_rule`` neither its links nor its clock can misbehave."""

    def __init__(self, add_rule: AddRule | None = None) -> None:
        self._add_rule = add_rule

    def apply(self, order: ProcessOrder) -> None:
        """Carry out ``order`` in a moment; a fault with a duration ends by itself.

        Raises:
            FaultNotPossible: this process cannot do that to itself; the text says why.
        """
        if self._add_rule is None:
            raise FaultNotPossible("this process is not one that can be made to misbehave from within")
        loop = asyncio.get_running_loop()
        if isinstance(order, LinkOrder):
            loop.call_later(ANSWER_S, self._add_rule, _rule(order), order.lasts_s)
            return
        if isinstance(order, MemoryOrder):
            loop.call_later(ANSWER_S, scarce_memory.strike)
            return
        loop.call_later(ANSWER_S, _shift_clock, order.jump_s)
        if order.lasts_s is not None:
            loop.call_later(ANSWER_S + order.lasts_s, _shift_clock, -order.jump_s)


def _rule(order: LinkOrder) -> LinkRule:
    kind = Misbehaviour(order.kind)
    lane = Lane[order.lane.upper()] if order.lane else None
    if kind is Misbehaviour.CORRUPT and lane is not Lane.BULK:
        raise FaultNotPossible("only messages of the bulk lane can be corrupted: nothing else on the wire has a hash")
    return LinkRule(
        kind,
        peers=frozenset(order.peers),
        lane=lane,
        probability=order.probability,
        delay_s=order.delay_ms / 1000,
        jitter_s=order.jitter_ms / 1000,
    )


def _shift_clock(by_s: float) -> None:
    """Set ``time.time`` of this process ahead by ``by_s``; the event loop's clock does not change."""
    before = time.time
    time.time = lambda: before() + by_s


def faults_of(transport: Transport) -> ProcessFaults:
    """The faults of the process that ``transport`` belongs to."""
    return ProcessFaults(transport.add if isinstance(transport, FaultableTransport) else None)


def signal_later(pids: Sequence[int], number: signal.Signals, after_s: float) -> None:
    """Have ``number`` sent to ``pids`` after ``after_s``, even if this process is stopped or dead by then."""
    targets = " ".join(str(pid) for pid in pids)
    script = f"(sleep {after_s:.3f}; kill -{number.name.removeprefix('SIG')} {targets}) >/dev/null 2>&1 &"
    # the shell ends at once, so that init adopts the sleeper, and reaps it
    limit_s = DEFAULT_LIMITS.fault_order_timeout_s
    command = ["/bin/sh", "-c", script]
    subprocess.run(command, stdin=subprocess.DEVNULL, start_new_session=True, timeout=limit_s, check=False)
