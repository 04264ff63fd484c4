"""What a node agent knows of its processes, which of them wait for other work, and the agent's options."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from supervisors.machine.machine import CLUSTER, LOCAL, Machine
from supervisors.machine.membership.failure_detector import FailureDetector
from supervisors.machine.membership.nodes import Neighbours
from supervisors.machine.processes.process import Child, Launch, ProcessExit, role_command
from supervisors.tree.messages import ProcessInfo, ProcessReady, SpawnProcess
from transport.address import ActorAddress


@dataclass
class Managed:
    """A process of a node agent, with all that is known of it."""

    order: SpawnProcess
    owner: ActorAddress
    process: Child
    detector: FailureDetector
    log_path: Path
    started_s: float
    ready: asyncio.Future[ProcessReady | None]
    """Report of the process once it is ready; None: it ended first."""
    contact: ActorAddress | None = None
    """Actor that speaks for the process, once it is ready."""
    report: ProcessReady | None = None
    verdict: str = ""
    orphan: bool = False
    """True while it is being stopped because its owner stayed away; a new process of its name replaces it at once."""
    end: ProcessExit | None = None
    loop_lag_s: float = 0.0
    link_lost: bool = False

    def info(self, now_s: float) -> ProcessInfo:
        """What others are told of it."""
        return ProcessInfo(
            name=self.order.name,
            role=self.order.args.role,
            pid=self.process.pid,
            incarnation=self.report.incarnation if self.report else 0,
            health=str(self.detector.health(now_s)),
            addresses=self.report.addresses if self.report else {},
            loop_lag_s=self.loop_lag_s,
            devices=self.order.devices or (),
        )


_Kind = tuple[str, tuple[str, ...] | None]
"""Role of a process, and the devices that it sees."""


class ParkedProcesses:
    """Holds processes of this machine that have left their job and wait for another (``tenancy``): at most ``most``;
    if there are more, the one that has waited longest is dismissed.

    A process cannot change the devices that it sees: it is given only work that wants the same.
    Work goes to the process that has waited shortest: what it has loaded is most likely still in memory.
    """

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self._waiting: deque[tuple[_Kind, Child]] = deque()

    def add(self, role: str, devices: tuple[str, ...] | None, process: Child) -> None:
        self._waiting.append(((role, devices), process))
        while len(self._waiting) > self.most:
            self._waiting.popleft()[1].dismiss()

    def serve(self, role: str, launch: Launch) -> Child | None:
        """Give this work to a process that waits; None: the work needs a new one, or none of its kind waits."""
        while launch.may_stay and (waiting := self._take((role, launch.devices))) is not None:
            if (process := waiting.serve(launch)) is not None:
                return process
            waiting.dismiss()
        return None

    def _take(self, kind: _Kind) -> Child | None:
        self._waiting = deque((known, process) for known, process in self._waiting if process.stays)
        for entry in reversed(self._waiting):
            if entry[0] == kind:
                self._waiting.remove(entry)
                return entry[1]
        return None

    async def end(self) -> None:
        """End all of them, and wait until they are gone."""
        processes = [process for _, process in self._waiting if process.stays]
        self._waiting.clear()
        for process in processes:
            process.dismiss()
        for process in processes:
            await process.reaped()


@dataclass
class NodeOptions:
    """The options that a node agent is given by its process."""

    cluster: str = CLUSTER
    listen: str = ""
    """Endpoint of role processes, ``{name}`` filled in; empty: derived from the agent's own endpoint."""
    command: list[str] = field(default_factory=role_command)
    keys: str = ""
    neighbours: Neighbours = ()
    seed: int = 0
    machine: Machine = LOCAL


def beside(endpoint: str) -> str:
    """Where a process may listen whose agent is reached at ``endpoint``; ``{name}`` stands for the process."""
    address = endpoint.partition("?")[0]
    if address.startswith("ipc://"):
        return f"{address.rpartition('/')[0]}/{{name}}"
    if address.startswith("tcp://"):
        return f"{address.rpartition(':')[0]}:*"
    if address.startswith("memory://"):
        return f"{address}/{{name}}"
    raise ValueError(f"a node agent at {endpoint!r}: expected ipc, tcp or memory")
