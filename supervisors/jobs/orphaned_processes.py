"""Ends the processes of an earlier head on a node that comes back late, if they run elsewhere by now.

    node joins ─▶ ListProcesses ─▶ of this job, and its child runs as another process? ─▶ StopProcess
                       ▲                └─ its child is just being started: look again ─┐
                       └────────────────────────────────────────────────────────────────┘

Otherwise such a process would offer itself, be refused, and hold its memory until ``orphan_grace_s`` is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from actors.core.errors import AskError
from supervisors.machine.membership.nodes import Node, Nodes
from supervisors.tree.child_record import ChildInfo
from supervisors.tree.messages import ListProcesses, ProcessList, StopProcess, StopReply
from supervisors.tree.restart_budget import ExitCause

if TYPE_CHECKING:
    from actors.core.system import ActorSystem
    from transport.address import ActorAddress

log = structlog.get_logger("headrace.orphans")


class OrphanedProcesses:
    """Looks for such processes of one job, from ``start`` to ``stop``. ``children``: its supervisors' children."""

    def __init__(self, system: ActorSystem, nodes: Nodes, job: str, children: Callable[[], list[ChildInfo]]) -> None:
        self._system = system
        self._nodes = nodes
        self._job = job
        self._children = children
        self._seen: set[ActorAddress] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unsubscribe: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Look at every node that is here, and at every one that comes."""
        self._unsubscribe = self._nodes.subscribe(self._look)
        self._look()

    def stop(self) -> None:
        """Look no more. Idempotent."""
        self._unsubscribe()
        self._unsubscribe = lambda: None
        for task in self._tasks:
            task.cancel()

    def _look(self) -> None:
        for node in self._nodes.present:
            if node.agent not in self._seen:
                self._seen.add(node.agent)
                task = asyncio.create_task(self._clear(node), name=f"orphans on {node.name}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _clear(self, node: Node) -> None:
        """Look until each of the job's processes on ``node`` is the one that its supervisor has, or is stopped."""
        limits = self._system.limits
        until_s = asyncio.get_running_loop().time() + limits.orphan_grace_s
        while asyncio.get_running_loop().time() < until_s:
            try:
                if await self._are_clear(node):
                    return
            except AskError as error:
                log.warning("a node is not clear of orphans yet; looking again", node=node.name, error=str(error))
            await asyncio.sleep(limits.health_check_s)

    async def _are_clear(self, node: Node) -> bool:
        agent, clear = self._system.ref(node.agent), True
        children = {f"{self._job}.{info.name}": info for info in self._children()}
        listed = (await agent.ask(ListProcesses(), ProcessList)).processes
        self._nodes.heard(node.name, {process.name: process.devices for process in listed})
        for process in listed:
            child = children.get(process.name)
            if child is None or (child.node, child.pid) == (node.name, process.pid):
                continue
            if child.state != "running":
                clear = False
                continue
            deadline_s = self._system.limits.stop_timeout_s
            order = StopProcess(name=process.name, deadline_s=deadline_s, cause=ExitCause.STOPPED)
            await agent.ask(order, StopReply, timeout_s=deadline_s + self._system.limits.spawn_overhead_s)
            node.devices.release(process.name)
        return clear
