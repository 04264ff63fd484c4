"""A supervisor's record of each child, and the events and views that it publishes of them."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass
from typing import Final

from supervisors.tree.children import ChildSpec, Running
from supervisors.tree.restart_budget import Backoff, CrashLoop, ExitCause
from supervisors.tree.strategies import ChildView


@dataclass(frozen=True, kw_only=True)
class ChildInfo:
    """Describes one child of a supervisor, as ``ctl tree`` shows it."""

    name: str
    role: str
    node: str
    pid: int
    state: str
    incarnation: int
    restarts: int


@dataclass(frozen=True)
class SupervisionEvent:
    """An event of a child, for people and metrics. ``at_s`` is time on the supervisor's clock."""

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
    """Error that ended the child, for people; empty: it named none."""
    permanent: bool = False
    """Flag that a restart would only meet the same error, so that the supervisor gives up next."""


class Stage(enum.StrEnum):
    """Stage of a child's life. Only ``Child.go`` changes it.

    DOWN ─▶ STARTING ─┬─▶ UP ─┬─▶ STOPPING ─▶ DOWN        stopped by us
      ▲               │       └─▶ DOWN                    it has ended
      ├── failed ◀────┤
      │               └─▶ CUT ─▶ LEFT ─┬─▶ STOPPING       given up, and ready all the same
      └────────────────────────────────┘                  given up before it was ready
    """

    DOWN = "down"
    """The child does not run: it waits for its start, or has ended."""
    STARTING = "starting"
    """The start is under way, or its task is about to run for the first time."""
    CUT = "cut"
    """The start was cancelled, for its group or at shutdown, but is not over. Its failure is not the child's fault."""
    LEFT = "left"
    """The cancelled start is over; the code that cancelled it will stop the child."""
    UP = "running"
    """The child became ready."""
    STOPPING = "stopping"
    """The supervisor has asked the child to end: that end is not judged."""


_NEXT: Final = {
    Stage.DOWN: {Stage.STARTING},
    Stage.STARTING: {Stage.UP, Stage.DOWN, Stage.CUT},
    Stage.CUT: {Stage.LEFT},
    Stage.LEFT: {Stage.STOPPING, Stage.DOWN},
    Stage.UP: {Stage.STOPPING, Stage.DOWN},
    Stage.STOPPING: {Stage.DOWN},
}


class Child:
    """Holds the supervisor's record of one child."""

    def __init__(self, spec: ChildSpec, backoff: Backoff, loop: CrashLoop) -> None:
        self.spec = spec
        self.backoff = backoff
        self.loop = loop
        self.stage = Stage.DOWN
        self.running: Running | None = None
        """Running child, kept while its end is to be judged: in UP, and in LEFT if it became ready."""
        self.down_as = "pending"
        """Reason why the child is down, for people: an exit cause, ``pending``, or ``backoff``."""
        self.no_start = asyncio.Event()
        """Event that is set while no start is under way."""
        self.no_start.set()
        self.start_scope: asyncio.Timeout | None = None
        self.restarts = 0
        self.failed_starts = 0
        """Number of failed starts in a row, of a child that was never ready."""
        self.ready_s = 0.0
        self.reason = ""
        self.settled = asyncio.Event()
        """Event that is set while the child runs, or is not to be started any more."""

    # ------------------------------------------------------------ its stages

    def go(self, stage: Stage) -> None:
        """Enter ``stage``.

        Raises:
            RuntimeError: the present stage does not lead there.
        """
        if stage not in _NEXT[self.stage]:
            raise RuntimeError(f"{self.spec.name} cannot go from {self.stage.name} to {stage.name}")
        self.stage = stage
        if stage in (Stage.STARTING, Stage.CUT):
            self.no_start.clear()
        else:
            self.no_start.set()

    def cut_start(self, now_s: float) -> None:
        """Cancel a start that is under way, or about to run for the first time."""
        if self.stage is Stage.STARTING:
            self.go(Stage.CUT)
        if self.start_scope is not None:
            self.start_scope.reschedule(now_s)

    def start_over(self, running: Running | None) -> bool:
        """Note that the start is over, and the child ``running`` or not; returns whether it was not cancelled."""
        wanted, self.running, self.start_scope = self.stage is Stage.STARTING, running, None
        if running is not None:
            self.failed_starts = 0
        else:
            self.down_as = str(ExitCause.STOPPED)
        ended = Stage.UP if running is not None else Stage.DOWN
        self.go(ended if wanted else Stage.LEFT)
        return wanted

    # ------------------------------------------------------------ how others see it

    @property
    def state(self) -> str:
        """Stage of the child, for people."""
        if self.stage is Stage.CUT:
            return str(Stage.STARTING)
        if self.stage in (Stage.DOWN, Stage.LEFT):
            return self.down_as if self.running is None else str(Stage.UP)
        return str(self.stage)

    def view(self) -> ChildView:
        up = self.running is not None or self.stage in (Stage.STARTING, Stage.CUT)
        return ChildView(self.spec.name, self.spec.restart, up, self.spec.group)

    def info(self) -> ChildInfo:
        """The child as ``ctl tree`` shows it."""
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
