"""What supervisors, node agents and role processes say to each other.

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
    """This process is ready for work."""

    name: str
    node: str
    pid: int
    incarnation: int
    """Incarnation of its peer; new with every start."""
    addresses: dict[str, ActorAddress]
    """Addresses of its actors by name."""
    seconds: float
    """Time from exec to ready."""


class ProcessFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A failure says why a process did not become ready."""

    cause: ExitCause
    detail: str
    reason: Reason | None = None
    """The error by which it ended, if it said one."""
    exit_code: int | None = None
    log_tail: tuple[str, ...] = ()
    log_path: str = ""


@message("node.spawn")
class SpawnProcess(Message):
    """Ask: start a role process; the answer comes when it is ready or has failed. The asker becomes its owner.

    It has the agent's own environment, but for the devices that it sees: whoever orders a process does not say what
    else runs in it.
    """

    name: str
    """Name, unique at this agent: ``<job>.<actor>``."""
    args: AnyArgs
    """``node`` is filled in by the agent."""
    ready_timeout_s: float
    beacon_budget_s: float
    """Time for which its event loop may be silent while its link lives, before it counts as hung."""
    limits: str = ""
    """``Limits`` as JSON, the job's; empty: the agent's own. A job's limits hold on every machine."""
    may_stay: bool = False
    """True: when its work is over, the process may be kept, and given work of the same role, of any job."""
    devices: tuple[str, ...] | None = None
    """Devices of the machine that it is to have, and sees no others; None: it sees all that the machine lends."""


@message("node.spawn_reply")
class SpawnReply(Message):
    """Exactly one of the two is set."""

    started: ProcessStarted | None = None
    failure: ProcessFailure | None = None


@message("node.stop")
class StopProcess(Message):
    """Ask: SIGTERM, SIGKILL after the deadline. Answered with StopReply when it is gone; unknown names are gone."""

    name: str
    deadline_s: float
    cause: ExitCause = ExitCause.STOPPED
    """Cause that its exit is to be reported with: stopped, preempted."""


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
    """Ask; answered with ProcessList."""


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """This describes one process of a node agent."""

    name: str
    role: str
    pid: int
    incarnation: int
    health: str
    """Health, as in ``failure_detector.Health``."""
    addresses: dict[str, ActorAddress] = msgspec.field(default_factory=dict)
    loop_lag_s: float = 0.0
    """The worst lag of its event loop in its last beacon interval."""
    devices: tuple[str, ...] = ()
    """Devices that it was given."""


@message("node.processes")
class ProcessList(Message):
    node: str
    processes: list[ProcessInfo]


@message("node.process_ready")
class ProcessReady(Message):
    """Ask, role process to its agent: all its actors are up. Repeated until it is answered, with core's Done."""

    name: str
    pid: int
    incarnation: int
    addresses: dict[str, ActorAddress]


@message("node.process_beacon")
class ProcessBeacon(Message):
    """Role process to its agent, every ``beacon_interval_s``: the event loop turns."""

    name: str
    pid: int
    loop_lag_s: float


@message("node.process_exited")
class ProcessExited(Message):
    """Node agent to the owner of a process that had become ready."""

    name: str
    node: str
    pid: int
    incarnation: int
    cause: ExitCause
    exit_code: int
    """Exit code; -n: ended by signal n."""
    detail: str
    reason: Reason | None = None
    """The error by which it ended, if it said one."""
    log_tail: tuple[str, ...] = ()
