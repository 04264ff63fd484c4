"""Faults on one node's processes, from within the process that has started them: signals, slowness, the node itself.

``NodeFaults`` runs beside the node agent, to which its faults come from outside. The agent's machine is only told which
processes are slowed down (``LocalMachine.slowed``), so that they are not taken for stopped ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Final

import psutil

from actors.core.actor import Actor, handles
from supervisors.faults.fault_messages import ApplyFault, FaultApplied, SignalChild, SignalNode, SlowChild
from supervisors.faults.process_faults import ANSWER_S, ProcessFaults, signal_later
from supervisors.tree.errors import FaultNotPossible

NAME: Final = "faults"
"""The name of this actor, in the process of each node agent."""
_PERIOD_S: Final = 0.1
"""The time of one stop and go of a slowed process: much shorter than any heartbeat."""


class NodeFaults(Actor):
    """Commits faults on the processes of its node.

    ``slowed``: ids of the processes that are slowed down, shared with the machine (``LocalMachine.slowed``).
    """

    def __init__(self, own: ProcessFaults, slowed: set[int]) -> None:
        self._own = own
        self._slowed = slowed

    @handles(ApplyFault)
    async def apply_fault(self, message: ApplyFault) -> FaultApplied:
        self.ctx.log.warning("a fault is injected", order=str(message.order))
        self._own.apply(message.order)
        return FaultApplied()

    @handles(SignalChild)
    async def signal_child(self, message: SignalChild) -> FaultApplied:
        child = _child(message.pid)
        self.ctx.log.warning("a fault is injected", signal=message.signal, pid=message.pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(message.signal)
        return FaultApplied()

    @handles(SlowChild)
    async def slow_child(self, message: SlowChild) -> FaultApplied:
        child = _child(message.pid)
        if message.pid in self._slowed:
            raise FaultNotPossible(f"process {message.pid} is slowed down already")
        self.ctx.log.warning("a fault is injected", slow=message.factor, pid=message.pid)
        self._slowed.add(message.pid)
        self.ctx.start_task(self._slow(child, message.factor, message.lasts_s), f"slow {message.pid}")
        return FaultApplied()

    async def _slow(self, child: psutil.Process, factor: float, lasts_s: float | None) -> None:
        until_s = None if lasts_s is None else self.ctx.now() + lasts_s
        run_s = _PERIOD_S / factor
        try:
            while until_s is None or self.ctx.now() < until_s:
                child.suspend()
                await self.ctx.sleep(_PERIOD_S - run_s)
                child.resume()
                await self.ctx.sleep(run_s)
        except psutil.NoSuchProcess:
            pass  # it has ended meanwhile
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.resume()
            self._slowed.discard(child.pid)

    @handles(SignalNode)
    async def signal_node(self, message: SignalNode) -> FaultApplied:
        self.ctx.log.warning("a fault is injected", signal=message.signal, node=self.ctx.self_address.peer.name)
        asyncio.get_running_loop().call_later(ANSWER_S, _signal_node, message.signal, message.continue_after_s)
        return FaultApplied()


def _signal_node(number: int, continue_after_s: float | None) -> None:
    own = os.getpid()
    pids = [own]
    if number == signal.SIGSTOP:
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.suspend()
                pids.append(child.pid)
        if continue_after_s is not None:
            signal_later(pids, signal.SIGCONT, continue_after_s)
    os.kill(own, number)


def _child(pid: int) -> psutil.Process:
    """The process of that id, if this process has started it.

    Raises:
        FaultNotPossible: it is gone, or not a child of this process: no fault may hit a bystander.
    """
    try:
        child = psutil.Process(pid)
        if child.ppid() == os.getpid():
            return child
    except psutil.NoSuchProcess:
        pass
    raise FaultNotPossible(f"process {pid} is not one of this node's any more")
