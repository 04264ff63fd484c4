"""The rollout workers of one job, as their pool starts them, has them drained, and removes them.

    drain ─▶ Drain ─▶ worker hands back its samples ─┬─▶ it has gone by itself (with notice, or lent) ─┐
                                                     └─▶ at once ─────────────────────────────────────┴▶ removed

Invariants
- A worker of several ranks is one worker: it is counted, drained and removed by its leader's name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from actors.protocol.work import Drain
from configs.names import follows
from configs.schema import JobConfig
from supervisors.tree.child_record import ChildInfo, SupervisionEvent
from supervisors.tree.restart_budget import ExitCause, RestartPolicy
from transport.transport import SendOutcome

if TYPE_CHECKING:
    from actors.core.system import ActorSystem
    from supervisors.tree.children import ChildSpec
    from supervisors.tree.supervisor import Supervisor


class News(Protocol):
    """Where a pool tells what becomes of it, and hears of the job's steps (``jobs/job_news.py``)."""

    def say(self, **progress: Any) -> None: ...
    def record(self, name: str, **fields: float | str) -> None: ...
    def subscribe(self, listener: Callable[[Mapping[str, Any]], None]) -> Callable[[], None]: ...


class Processes(Protocol):
    """Makes the processes of a job's roles, and gives up their places (``jobs/role_processes.py``)."""

    def children(self, name: str, role: str, place: str, restart: RestartPolicy) -> list[ChildSpec]: ...
    def release(self, name: str) -> None: ...


class RolloutWorkers:
    """Acts on the supervisor of one job's workers, if there is one yet.

    Args:
        supervisor: finds that supervisor; None: there is none yet.
        lent: whether workers pass between this job and others: such a worker goes by itself, and its process stays.
    """

    def __init__(
        self,
        system: ActorSystem,
        job: JobConfig,
        processes: Processes,
        supervisor: Callable[[], Supervisor | None],
        news: News,
        *,
        lent: bool,
    ) -> None:
        self._system, self._job, self._processes = system, job, processes
        self._supervisor, self._news, self._lent = supervisor, news, lent
        place = job.cluster.place_rollout
        self._place = "local" if place == "elastic" else place
        self._leaving: dict[str, asyncio.Event] = {}
        """Workers that are about to go by themselves → set when they have gone."""

    # ------------------------------------------------------------ what there is

    @property
    def begun(self) -> bool:
        """Whether the workers have been started; not while the model is being prepared."""
        return self._supervisor() is not None

    def names(self) -> set[str]:
        return {info.name for info in self._infos()}

    def on(self, node: str) -> list[str]:
        """Names of the workers on ``node``."""
        return [info.name for info in self._infos() if info.node == node]

    def running(self) -> int:
        """Number of workers that run."""
        return sum(self.runs(name) for name in self.names())

    def runs(self, name: str) -> bool:
        return (supervisor := self._supervisor()) is not None and supervisor.running(name) is not None

    def _infos(self) -> list[ChildInfo]:
        supervisor = self._supervisor()
        return [] if supervisor is None else [info for info in supervisor.snapshot() if not follows(info.name)]

    # ------------------------------------------------------------ acts

    def specs(self, number: int) -> list[ChildSpec]:
        """The worker of that number, on a machine that stays; one that speaks to a server is on the head's."""
        worker = f"rollout-{number}"
        place = "local" if self._job.rollout.server_of(worker) else self._place
        return self._processes.children(worker, "rollout", place, RestartPolicy.PERMANENT)

    def specs_on(self, worker: str, node: str) -> list[ChildSpec]:
        """A worker on a machine that comes and goes, there and nowhere else; its pool says whether it comes again."""
        return self._processes.children(worker, "rollout", f"node:{node}", RestartPolicy.TEMPORARY)

    def start(self, specs: list[ChildSpec]) -> None:
        """Raises:
        ValueError: the one that had the name before is still being removed.
        """
        if (supervisor := self._supervisor()) is not None:
            supervisor.add_children(specs)

    async def remove(self, name: str, cause: ExitCause = ExitCause.STOPPED) -> None:
        """End a worker, if it has not ended."""
        if (supervisor := self._supervisor()) is not None:
            await supervisor.remove_child(name, cause=cause)

    async def remove_lost(self, name: str) -> None:
        """Remove a worker whose machine is gone; if that comes back, the worker has no place there."""
        self._processes.release(name)
        await self.remove(name, ExitCause.PREEMPTED)

    async def drain(self, name: str, left_s: float = 0.0) -> bool:
        """Have a worker hand back its samples, then remove it; False if there is none of that name.

        ``left_s``: time for which the worker may go on with what it runs; 0: it is to go at once.
        """
        supervisor = self._supervisor()
        if supervisor is None or name not in self.names():
            return False
        running = supervisor.running(name)
        if running is not None:
            deadline_s, notice = (left_s, True) if left_s > 0 else (self._job.limits.stop_timeout_s, False)
            drain = Drain(job=self._job.name, deadline_s=deadline_s, reason="drained", notice=notice)
            sent = self._system.ref(running.address).tell(drain) is SendOutcome.QUEUED
            if sent and (notice or self._lent):
                await self._gone(name, deadline_s)
        await self.remove(name, ExitCause.PREEMPTED)
        self._processes.release(name)
        return True

    async def _gone(self, name: str, within_s: float) -> None:
        """Wait until a worker has ended by itself, or its time is over."""
        gone = self._leaving.setdefault(name, asyncio.Event())
        try:
            async with asyncio.timeout(within_s):
                await gone.wait()
        except TimeoutError:
            self._news.say(message=f"{name} has not gone within the {within_s:.1f} s of its notice")
        finally:
            self._leaving.pop(name, None)

    def child_event(self, event: SupervisionEvent) -> None:
        """Note which of the leaving workers has ended."""
        if event.kind in ("exited", "stopped") and (gone := self._leaving.get(event.child)) is not None:
            gone.set()
