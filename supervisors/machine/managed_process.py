"""What a node agent keeps of each of its processes, and how it is set up."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from supervisors.machine.failure_detector import FailureDetector
from supervisors.machine.machine import CLUSTER, LOCAL, Machine
from supervisors.machine.nodes import Neighbours
from supervisors.machine.process import Child, ProcessExit, role_command
from supervisors.tree.messages import ProcessInfo, ProcessReady, SpawnProcess
from transport.address import ActorAddress


@dataclass
class Managed:
    """A managed process is kept with all that is known of it."""

    order: SpawnProcess
    owner: ActorAddress
    process: Child
    detector: FailureDetector
    log_path: Path
    started_s: float
    ready: asyncio.Future[ProcessReady | None]
    """Report of the process once it is ready; None: it ended first."""
    contact: ActorAddress | None = None
    """The actor in it that speaks for it, once it is ready."""
    report: ProcessReady | None = None
    verdict: str = ""
    orphan: bool = False
    """True while it is stopped because its owner stayed away; nobody who wants one of its name has to wait for that."""
    end: ProcessExit | None = None
    loop_lag_s: float = 0.0
    link_lost: bool = False

    def info(self, now_s: float) -> ProcessInfo:
        """What others may know of it."""
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


@dataclass
class NodeOptions:
    """These options are what a node agent is given by its process."""

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
