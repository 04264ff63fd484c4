"""Messages between supervisors, node agents and role processes.

supervisor ──SpawnProcess──▶ node agent ── exec ──▶ role process
           ◀──SpawnReply───             ◀─ProcessReady, ProcessBeacon─
           ──StopProcess──▶
           ◀─ProcessExited─  (exactly one per process that had become ready)
"""

from __future__ import annotations

import msgspec

from actors.core.message import Message, message
from actors.core.reason import Reason
from actors.roles import AnyArgs
from supervisors.tree.restart_budget import ExitCause
from transport.address import ActorAddress


class ProcessStarted(msgspec.Struct, frozen=True, kw_only=True):
    """Says where a process that is ready for work runs."""

    name: str
    node: str
    pid: int
    incarnation: int
    """Incarnation of the process's peer; new with every start."""
    addresses: dict[str, ActorAddress]
    """Addresses of the process's actors by name."""
    seconds: float
    """Seconds from exec to ready."""


class ProcessFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Says why a process did not become ready."""

    cause: ExitCause
    detail: str
    reason: Reason | None = None
    """Error by which the process ended; None: it named none."""
    exit_code: int | None = None
    log_tail: tuple[str, ...] = ()
    log_path: str = ""


@message("node.spawn")
class SpawnProcess(Message):
    """Ask: start a role process; the answer comes when it is ready or has failed. The asker becomes its owner.

    The process gets the agent's environment except for the visible devices: an asker cannot choose what else runs
    in it.
    """

    name: str
    """Name of the process, unique at this agent: ``<job>.<actor>``."""
    args: AnyArgs
    """Arguments of the role; the agent fills in ``node``."""
    ready_timeout_s: float
    beacon_budget_s: float
    """Seconds for which its event loop may be silent while its link is up, before it counts as hung."""
    limits: str = ""
    """Limits of the job, as JSON, which hold on every machine; empty: the agent's own."""
    may_stay: bool = False
    """Permission to keep the process when its work is over, and give it work of the same role, of any job."""
    devices: tuple[str, ...] | None = None
    """Devices of the machine that the process may see; None: all that the machine lends."""


@message("node.spawn_reply")
class SpawnReply(Message):
    """Answer to SpawnProcess; exactly one of its fields is set."""

    started: ProcessStarted | None = None
    failure: ProcessFailure | None = None


@message("node.stop")
class StopProcess(Message):
    """Ask: SIGTERM, then SIGKILL after the deadline. StopReply comes when it is gone; unknown ones are gone."""

    name: str
    deadline_s: float
    cause: ExitCause = ExitCause.STOPPED
    """Cause with which the exit is reported: stopped or preempted."""


@message("node.stop_reply")
class StopReply(Message):
    exit_code: int | None = None
    """Exit code; None: there was no such process."""


@message("node.adopt")
class AdoptProcesses(Message):
    """Ask: the asker becomes the owner of these processes, whose former owner is gone. Answered with ProcessList."""

    names: tuple[str, ...]


@message("node.list")
class ListProcesses(Message):
    """Ask for the agent's processes; answered with ProcessList."""


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Describes one process of a node agent."""

    name: str
    role: str
    pid: int
    incarnation: int
    health: str
    """Health, as in ``failure_detector.Health``."""
    addresses: dict[str, ActorAddress] = msgspec.field(default_factory=dict)
    loop_lag_s: float = 0.0
    """Worst lag of the process's event loop in its last beacon interval."""
    devices: tuple[str, ...] = ()
    """Devices that the process was given."""


@message("node.processes")
class ProcessList(Message):
    node: str
    processes: list[ProcessInfo]


@message("node.process_ready")
class ProcessReady(Message):
    """Ask, role process to its agent: all its actors are up. Repeated until it is answered with ``Done``."""

    name: str
    pid: int
    incarnation: int
    addresses: dict[str, ActorAddress]


@message("node.process_beacon")
class ProcessBeacon(Message):
    """Role process to its agent, every ``beacon_interval_s``: its event loop runs."""

    name: str
    pid: int
    loop_lag_s: float


@message("node.process_exited")
class ProcessExited(Message):
    """Node agent to the owner of a process that had become ready: the process has ended."""

    name: str
    node: str
    pid: int
    incarnation: int
    cause: ExitCause
    exit_code: int
    """Exit code; -n: ended by signal n."""
    detail: str
    reason: Reason | None = None
    """Error by which the process ended; None: it named none."""
    log_tail: tuple[str, ...] = ()
