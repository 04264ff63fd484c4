"""What a supervisor keeps of each child, and what it tells of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from supervisors.tree.children import ChildSpec, Running
from supervisors.tree.restart_budget import Backoff, CrashLoop, ExitCause
from supervisors.tree.strategies import ChildView


@dataclass(frozen=True, kw_only=True)
class ChildInfo:
    """This describes one child of a supervisor, as ``ctl tree`` shows it."""

    name: str
    role: str
    node: str
    pid: int
    state: str
    incarnation: int
    restarts: int


@dataclass(frozen=True)
class SupervisionEvent:
    """An event is something that people and metrics want to know. ``at_s`` is the supervisor's clock."""

    kind: str
    """Kind: started, adopted, start_failed, exited, restarting, stopped, ended, gave_up."""
    supervisor: str
    child: str
    at_s: float
    cause: ExitCause | None = None
    detail: str = ""
    restarts: int = 0
    incarnation: int = 0
    reason: str = ""
    """The error that ended the child, as people read it; empty if it named none."""
    permanent: bool = False
    """Whether that error could only be met again, so that the supervisor gives up next."""


class Child:
    """This is the supervisor's record of one child."""

    def __init__(self, spec: ChildSpec, backoff: Backoff, loop: CrashLoop) -> None:
        self.spec = spec
        self.backoff = backoff
        self.loop = loop
        self.state = "pending"
        self.running: Running | None = None
        self.starting = False
        self.idle = asyncio.Event()
        """Set while no start is under way."""
        self.idle.set()
        self.restarts = 0
        self.failed_starts = 0
        self.ready_s = 0.0
        self.reason = ""
        self.start_scope: asyncio.Timeout | None = None
        self.is_cut = False
        """True from when a start is given up, for its group or at the end of all, until the child is stopped. Such a
        start fails by no fault of its own, and its end is told then."""
        self.settled = asyncio.Event()
        """Set while it runs, or is not to be started any more."""

    def view(self) -> ChildView:
        up = self.running is not None or self.starting
        return ChildView(self.spec.name, self.spec.restart, up, self.spec.group)

    def cut_start(self, now_s: float) -> None:
        """Give up a start that is under way, or about to take its first turn."""
        if self.starting:
            self.is_cut = True
        if self.start_scope is not None:
            self.start_scope.reschedule(now_s)

    def info(self) -> ChildInfo:
        """As ``ctl tree`` shows it."""
        running = self.running
        return ChildInfo(
            name=self.spec.name,
            role=self.spec.role,
            node=running.node if running else "",
            pid=running.pid if running else 0,
            state=self.state,
            incarnation=running.incarnation if running else 0,
            restarts=self.restarts,
        )
