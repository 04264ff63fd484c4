"""The supervised actors and processes of one job: how they are started, counted, moved and taken down.

core       metrics ─▶ scheduler ─▶ job           in the head; rest_for_one
services   weights, rewards, trainer, ranker;    a process each, on the head's machine; a trainer of several ranks
           gateway, environments-0 …,            is a group of processes, some of which may be on other machines
           where the job has episodes
rollout    rollout-0 …                           a process each, or a group, where ``cluster.place_rollout`` says

Invariants
- Parts start in this order and stop in the reverse one.
- A worker of several ranks is one worker: it is counted, scaled, drained, moved and removed by its leader's name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from actors.jobs.job import Job
from actors.protocol.workers import WorkerEnded
from actors.scheduler.scheduler import Scheduler
from configs.names import follows, leader_of
from configs.schema import JobConfig
from supervisors.jobs.job_news import JobNews, failure_in_words
from supervisors.jobs.role_processes import RoleProcesses
from supervisors.machine.machine import Machine
from supervisors.machine.membership.nodes import Nodes
from supervisors.pool.make_pool import make_pool
from supervisors.pool.rollout_workers import RolloutWorkers
from supervisors.pool.slot_shares import WHOLE, PoolShare
from supervisors.tree.child_record import ChildInfo
from supervisors.tree.children import ChildSpec, actor_child
from supervisors.tree.restart_budget import ExitCause, RestartPolicy
from supervisors.tree.strategies import Strategy
from supervisors.tree.supervisor import SupervisionEvent, Supervisor

if TYPE_CHECKING:
    from actors.core.system import ActorSystem
    from transport.address import ActorAddress

MakeJob = Callable[[], Job]


class JobTree:
    """Starts and stops the actors and processes of one job, and hears how they end."""

    def __init__(
        self,
        system: ActorSystem,
        nodes: Nodes,
        machine: Machine,
        job: JobConfig,
        run_dir: Path,
        news: JobNews,
        *,
        workers: int,
        adopting: bool,
        share: PoolShare = WHOLE,
        service: Callable[[], Awaitable[ActorAddress]] | None = None,
        functions: str = "",
        machines: str = "",
    ) -> None:
        """Args:
        workers: rollout workers wanted on machines that stay.
        adopting: whether processes may run already, started by a former life of the head.
        share: this job's share of the machines that come and go.
        service: finds the training service as it runs now; None: the trainer computes itself.
        functions: the book of the functions that a former life of the head has started.
        machines: beginning of the names of the job's own machines.
        """
        self._system, self._nodes, self._machine = system, nodes, machine
        self._job, self._run_dir, self._news = job, run_dir, news
        lent = share is not WHOLE  # then workers pass between this job and others
        self._processes = RoleProcesses(
            nodes, job, run_dir, self.address("scheduler"), self.address("metrics"),
            adopting=adopting, may_stay=lent, service=service, record=news.record,
        )  # fmt: skip
        self._resumed = not adopting
        """True until the run's first scheduler has started: later ones keep the operator's orders."""
        self._supervisors: dict[str, Supervisor] = {}
        rollout = RolloutWorkers(
            system, job, self._processes, lambda: self._supervisors.get("rollout"), news, lent=lent
        )  # fmt: skip
        self.pool = make_pool(
            job, nodes, rollout, news, wanted=workers, share=share, functions=functions, machines=machines,
            trainer_runs=self.trainer_runs, restart_trainer=self.restart_trainer,
            now=asyncio.get_running_loop().time,
        )  # fmt: skip
        """Pool that says how many rollout workers there are, and where."""

    # ------------------------------------------------------------ what there is

    @property
    def supervisors(self) -> Mapping[str, Supervisor]:
        return self._supervisors

    def children(self) -> list[ChildInfo]:
        """Every supervised actor of the job, by supervisor."""
        return [info for supervisor in self._supervisors.values() for info in supervisor.snapshot()]

    def restarts(self) -> int:
        """Restarts of all actors and processes, since this head took them over."""
        return sum(supervisor.restarts for supervisor in self._supervisors.values())

    def address(self, part: str) -> ActorAddress:
        """Address of ``scheduler``, ``job``, ``metrics``, or ``news``, which hears the job."""
        return self._system.address(f"{part}.{self._job.name}")

    # ------------------------------------------------------------ start

    async def start_core(self, make_job: MakeJob, vocabulary: int = 0, route_bytes: int | None = None) -> None:
        """Start the actors in the head. ``vocabulary`` and ``route_bytes``: see ``Scheduler``."""
        name, job, run_dir = self._job.name, self._job, self._run_dir
        metrics = self.address("metrics")

        def make_scheduler() -> Scheduler:
            journal = self._machine.journal(job, run_dir)
            told = {"resumed": self._resumed, "vocabulary": vocabulary, "route_bytes": route_bytes}
            return Scheduler(job, run_dir, journal, metrics, **told)

        core = [
            actor_child(f"metrics.{name}", lambda: self._machine.metrics(job, run_dir), node="head", role="metrics"),
            actor_child(f"scheduler.{name}", make_scheduler, node="head", role="scheduler"),
            actor_child(f"job.{name}", make_job, node="head", role="job"),
        ]
        await self._supervise("core", Strategy.REST_FOR_ONE, core)

    async def start_processes(self, model_path: Path, job: JobConfig) -> None:
        """Start services and rollout workers together, and wait until all are ready. ``job`` has its data on disk."""
        self._processes.prepared(model_path, job)
        services = self._service_child("rewards")
        for name, role in self._job.environment.processes.items():
            services += self._processes.children(name, role, "local")
        if not self._job.only_evaluates:
            services = [*self._service_child("weights"), *services, *self._trainer()]
        if self._job.rollout.length_ranking == "learned":
            services += self._service_child("ranker")
        workers = self.pool.starting()
        await asyncio.gather(
            self._supervise("services", Strategy.ONE_FOR_ONE, services),
            self._supervise("rollout", Strategy.ONE_FOR_ONE, workers),
        )
        self._news.say(message="every process is ready", processes="ready")
        if devices := self._nodes.devices_in_words():
            self._news.say(message=devices)
        self.pool.ready()

    def trainer_runs(self) -> bool:
        """Whether the trainer's process runs now."""
        services = self._supervisors.get("services")
        return services is not None and services.running("trainer") is not None

    async def _supervise(self, part: str, strategy: Strategy, children: list[ChildSpec]) -> None:
        name = f"{part}.{self._job.name}"
        supervisor = Supervisor(name, strategy, children, on_event=self._on_supervision, limits=self._job.limits)
        self._supervisors[part] = supervisor
        self._news.subscribe(lambda progress: supervisor.progressed() if "reward_mean" in progress else None)
        await self._system.spawn(name, supervisor)
        await supervisor.ready(self._job.limits.ready_timeout_s * self._job.limits.start_attempts_max)

    def _service_child(self, role: str) -> list[ChildSpec]:
        return self._processes.children(role, role, "local")

    def _trainer(self) -> list[ChildSpec]:
        """The trainer ends when the last step is done, and its ranks with it."""
        return self._processes.children("trainer", "trainer", "local", RestartPolicy.TRANSIENT)

    # ------------------------------------------------------------ the end

    async def failed(self) -> str:
        """Wait until a supervisor has given up, and say why."""
        ended = asyncio.Event()
        tasks = [
            asyncio.create_task(self._system.wait_stopped(f"{part}.{self._job.name}"), name=f"{part} supervisor")
            for part in self._supervisors
        ]
        for task in tasks:
            task.add_done_callback(lambda _: ended.set())
        try:
            await ended.wait()
        finally:
            for task in tasks:
                task.cancel()
        errors = [task.result().error for task in tasks if task.done() and not task.cancelled()]
        return "; ".join(str(error) for error in errors if error is not None) or "the job's tree was stopped"

    async def stop(self) -> None:
        """Stop all parts, youngest first; then their places on the nodes are free for other jobs."""
        names = [info.name for info in self.children()]
        self.pool.stop()
        try:
            for part in ("rollout", "services", "core"):
                await self._stop_part(part)
        finally:  # a head that serves other jobs, too, must not keep the places of this one
            for name in names:
                self._nodes.release(f"{self._job.name}.{name}")
            self._processes.end()

    async def _stop_part(self, part: str) -> None:
        name = f"{part}.{self._job.name}"
        try:
            if name in self._system.actors():
                await self._system.stop_actor(name)
        finally:
            if part == "rollout":
                self.pool.ended()

    # ------------------------------------------------------------ operators

    async def restart_trainer(self) -> None:
        """End the trainer in good order and start it again elsewhere, at no cost to its restart budget."""
        if (services := self._supervisors.get("services")) is None:
            return
        await services.remove_child("trainer", cause=ExitCause.PREEMPTED)
        services.add_children(self._trainer())

    # ------------------------------------------------------------ what supervisors tell

    def _on_supervision(self, event: SupervisionEvent) -> None:
        fields: dict[str, float | int | str] = {"child": event.child, "supervisor": event.supervisor}
        fields |= {"cause": str(event.cause or ""), "detail": event.detail, "incarnation": event.incarnation}
        fields["at_s"] = round(event.at_s, 6)  # the clock of restart budgets; the line's own time is the wall clock's
        self._news.record(f"child_{event.kind}", **fields)
        if event.kind == "started" and event.child == f"scheduler.{self._job.name}":
            self._resumed = False
        if event.kind == "exited" and event.supervisor == f"rollout.{self._job.name}":
            self._tell_end(event)
        if event.kind == "ended":
            self._nodes.release(f"{self._job.name}.{event.child}")  # it is not started again: others may have its place
        self.pool.child_event(event)
        if event.kind == "restarting" or (
            event.kind == "start_failed" and not event.permanent
        ):  # else the run's end tells it
            self._news.say(message=failure_in_words(event))

    def _tell_end(self, event: SupervisionEvent) -> None:
        """Tell the scheduler, which sees a link break and cannot know why. A rank's end is that of its worker."""
        worker, incarnation = leader_of(event.child), event.incarnation
        if follows(event.child):
            leader = self._supervisors["rollout"].running(worker)
            if leader is None:
                return  # it has been told of already
            incarnation = leader.incarnation
        crashed = event.cause is ExitCause.CRASHED
        news = WorkerEnded(
            job=self._job.name, worker=worker, incarnation=incarnation, crashed=crashed, detail=event.detail
        )
        self._system.ref(self.address("scheduler")).tell(news)
