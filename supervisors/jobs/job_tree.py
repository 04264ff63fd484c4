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
from actors.protocol.work import Drain
from actors.protocol.workers import WorkerEnded
from actors.scheduler.scheduler import Scheduler
from configs.names import follows, leader_of
from configs.schema import JobConfig
from supervisors.jobs.capacity_target import CapacityTarget, Prices, prices_of
from supervisors.jobs.elastic_pool import ElasticPool
from supervisors.jobs.functions import Functions
from supervisors.jobs.job_news import JobNews, failure_in_words
from supervisors.jobs.pool_share import WHOLE, PoolShare
from supervisors.jobs.replica_moves import ReplicaMoves
from supervisors.jobs.role_processes import RoleProcesses
from supervisors.jobs.stage_balancer import StageBalancer
from supervisors.machine.machine import Machine
from supervisors.machine.nodes import Nodes
from supervisors.tree.child_record import ChildInfo
from supervisors.tree.children import ChildSpec, actor_child
from supervisors.tree.restart_budget import ExitCause, RestartPolicy
from supervisors.tree.strategies import Strategy
from supervisors.tree.supervisor import SupervisionEvent, Supervisor
from transport.transport import SendOutcome

if TYPE_CHECKING:
    from actors.core.system import ActorSystem
    from transport.address import ActorAddress

MakeJob = Callable[[], Job]


class JobTree:
    """A job tree is built for one job. ``workers``: rollout workers wanted; ``adopting``: processes may run already."""

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
    ) -> None:
        """``service``: finds the training service as it runs now; None: the trainer computes itself. ``functions``: the
        book of those that a former life of the head has begun with.
        """
        self._system, self._nodes, self._machine = system, nodes, machine
        self._job, self._run_dir, self._news = job, run_dir, news
        self._share = share
        self._processes = RoleProcesses(
            nodes, job, run_dir, self.address("scheduler"), self.address("metrics"),
            adopting=adopting, may_stay=self._is_lent, service=service, record=news.record,
        )  # fmt: skip
        self._resumed = not adopting
        """True until a scheduler has begun here: later ones go on with what this run's operator wants."""
        self._leaving: dict[str, asyncio.Event] = {}
        """Workers that are about to go by themselves → set when they have gone."""
        self._supervisors: dict[str, Supervisor] = {}
        self._pool: ElasticPool | None = None
        self._balancer: StageBalancer | None = None
        self._moves: ReplicaMoves | None = None
        if job.cluster.place_replicas == "remote" and not job.only_evaluates:
            self._moves = ReplicaMoves(
                nodes, f"{job.name}.trainer", news, runs=self._trainer_runs, restart=self.restart_trainer,
                now=asyncio.get_running_loop().time,
            )  # fmt: skip
        self._functions: Functions | None = None
        if job.provider.kind == "functions":
            now = asyncio.get_running_loop().time
            self._functions = Functions(job, nodes, news.say, news.record, now=now, former=functions)
        self.workers_wanted = workers

    # ------------------------------------------------------------ what there is

    @property
    def supervisors(self) -> Mapping[str, Supervisor]:
        return self._supervisors

    def children(self) -> list[ChildInfo]:
        """Every supervised actor of the job, supervisors' order."""
        return [info for supervisor in self._supervisors.values() for info in supervisor.snapshot()]

    def restarts(self) -> int:
        """Restarts of all actors and processes, since this head took them over."""
        return sum(supervisor.restarts for supervisor in self._supervisors.values())

    def address(self, part: str) -> ActorAddress:
        """Address of ``scheduler``, ``job``, ``metrics``, or ``news``, which hears the job."""
        return self._system.address(f"{part}.{self._job.name}")

    # ------------------------------------------------------------ start

    async def start_core(self, make_job: MakeJob) -> None:
        """The actors in the head."""
        name, job, run_dir = self._job.name, self._job, self._run_dir
        metrics = self.address("metrics")

        def make_scheduler() -> Scheduler:
            return Scheduler(job, run_dir, self._machine.journal(job, run_dir), metrics, resumed=self._resumed)

        core = [
            actor_child(f"metrics.{name}", lambda: self._machine.metrics(job, run_dir), node="head", role="metrics"),
            actor_child(f"scheduler.{name}", make_scheduler, node="head", role="scheduler"),
            actor_child(f"job.{name}", make_job, node="head", role="job"),
        ]
        await self._supervise("core", Strategy.REST_FOR_ONE, core)

    async def start_processes(self, model_path: Path, job: JobConfig) -> None:
        """Services and rollout workers, at once; returns when all are ready. ``job``: with its data on disk."""
        self._processes.prepared(model_path, job)
        services = self._service_child("rewards")
        for name, role in self._job.environment.processes.items():
            services += self._processes.children(name, role, "local")
        if not self._job.only_evaluates:
            services = [*self._service_child("weights"), *services, *self._trainer()]
            if self._moves is not None:
                self._moves.start()
        if self._job.rollout.length_ranking == "learned":
            services += self._service_child("ranker")
        workers = [child for index in range(self.workers_wanted) for child in self._worker(index)]
        await asyncio.gather(
            self._supervise("services", Strategy.ONE_FOR_ONE, services),
            self._supervise("rollout", Strategy.ONE_FOR_ONE, workers),
        )
        self._news.say(message="every process is ready", processes="ready")
        if devices := self._nodes.devices_in_words():
            self._news.say(message=devices)
        if self._pool is not None:
            self._pool.start()
        if self._functions is not None:
            self._functions.start()
        if self._job.scheduling.workers_max is not None and self._job.scheduling.policy != "planned":
            rollout = self._supervisors["rollout"]
            self._balancer = StageBalancer(self._job, rollout, self._size_pool, self._price_share, self._news.record)
            self._news.subscribe(self._balancer.hear)
        if self._job.scheduling.seeding and self._pool is not None:
            target = CapacityTarget(self._aim_at, self._news.record, self.workers_wanted, self._prices)
            self._news.subscribe(target.hear)

    @property
    def replica_moves(self) -> ReplicaMoves | None:
        """Where the trainer's replicas are, if some are on other machines."""
        return self._moves

    def _trainer_runs(self) -> bool:
        services = self._supervisors.get("services")
        return services is not None and services.running("trainer") is not None

    @property
    def functions(self) -> Functions | None:
        """Workers that are paid for only while they work, if the job has such."""
        return self._functions

    async def _size_pool(self, workers: int) -> None:
        """Stage balancing wants this many: on the machines that come and go, where there are such."""
        if self._pool is None:
            await self.scale(workers)
        else:
            self._aim_at(max(0, workers - self.workers_wanted))

    def _aim_at(self, remote: int) -> None:
        """At most so many on machines that come and go; the provider hears of it, too."""
        assert self._pool is not None, "only a pool can be aimed"
        self._pool.aim(remote)
        self._news.say(remote_workers=remote, remote_nodes=",".join(sorted(self._pool.nodes)))

    def _prices(self) -> Prices | None:
        return prices_of(self._nodes.present, self._job.cluster.prices)

    def _price_share(self) -> float | None:
        """Price of one more worker on a machine that comes and goes, as part of the price of everything with it."""
        kinds, present, prices = self._job.cluster.prices, self._nodes.present, self._prices()
        if self._pool is None or prices is None:
            return None
        return prices.worker / ((sum(kinds.get(node.kind, 0.0) for node in present) + prices.worker) or 1.0)

    async def _supervise(self, part: str, strategy: Strategy, children: list[ChildSpec]) -> None:
        name = f"{part}.{self._job.name}"
        supervisor = Supervisor(name, strategy, children, on_event=self._on_supervision, limits=self._job.limits)
        self._supervisors[part] = supervisor
        self._news.subscribe(lambda progress: supervisor.progressed() if "reward_mean" in progress else None)
        if part == "rollout" and self._job.cluster.place_rollout == "elastic":
            self._pool = self._elastic_pool(supervisor)
        await self._system.spawn(name, supervisor)
        await supervisor.ready(self._job.limits.ready_timeout_s * self._job.limits.start_attempts_max)

    def _service_child(self, role: str) -> list[ChildSpec]:
        return self._processes.children(role, role, "local")

    def _trainer(self) -> list[ChildSpec]:
        """It ends when the last step is done, and its ranks with it."""
        return self._processes.children("trainer", "trainer", "local", RestartPolicy.TRANSIENT)

    def _worker(self, index: int) -> list[ChildSpec]:
        place = self._job.cluster.place_rollout
        return self._processes.children(f"rollout-{index}", "rollout", "local" if place == "elastic" else place)

    @property
    def _is_lent(self) -> bool:
        """Whether workers pass between this job and others."""
        return self._share is not WHOLE

    def _elastic_pool(self, supervisor: Supervisor) -> ElasticPool:
        def make(worker: str, node: str) -> list[ChildSpec]:
            return self._processes.children(worker, "rollout", f"node:{node}", RestartPolicy.TEMPORARY)

        return ElasticPool(
            self._nodes, supervisor, make, self.drain_worker, self._processes.release, self._news.record,
            limits=self._job.limits, now=asyncio.get_running_loop().time, share=self._share,
            ranks=self._job.rollout.tensor_parallel,
        )  # fmt: skip

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
        """Youngest first; then their places on the nodes are free for other jobs."""
        names = [info.name for info in self.children()]
        if self._balancer is not None:
            self._balancer.stop()
        if self._functions is not None:
            self._functions.stop()
        if self._moves is not None:
            self._moves.stop()
        if self._pool is not None:
            self._pool.stop()
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
            if part == "rollout" and self._pool is not None:
                self._pool.ended()

    # ------------------------------------------------------------ operators

    async def scale(self, workers: int) -> None:
        """Set the number of rollout workers. Those that leave hand their samples back first."""
        if (rollout := self._supervisors.get("rollout")) is None:  # it will be started with as many
            self.workers_wanted = workers
            return
        of_pool = self._pool.workers if self._pool is not None else set[str]()
        present = {info.name for info in _workers(rollout)} - of_pool
        self.workers_wanted = workers
        self._news.say(workers=workers)
        for index in range(workers):
            if f"rollout-{index}" not in present:
                rollout.add_children(self._worker(index))
        for name in sorted(present - {f"rollout-{index}" for index in range(workers)}):
            await self.drain_worker(name)

    async def restart_trainer(self) -> None:
        """End the trainer in good order and start it again, at no cost: its training service is another one."""
        if (services := self._supervisors.get("services")) is None:
            return
        await services.remove_child("trainer", cause=ExitCause.PREEMPTED)
        services.add_children(self._trainer())

    async def drain_worker(self, name: str, left_s: float = 0.0) -> bool:
        """Have a worker hand back its samples, then remove it; False if there is none of that name.

        ``left_s``: it may go on with what it runs for as long as its machine is there; 0: it is to go at once.
        """
        rollout = self._supervisors.get("rollout")  # none while the model is being prepared
        if rollout is None or name not in {info.name for info in _workers(rollout)}:
            return False
        running = rollout.running(name)
        if running is not None:
            deadline_s, notice = (left_s, True) if left_s > 0 else (self._job.limits.stop_timeout_s, False)
            drain = Drain(job=self._job.name, deadline_s=deadline_s, reason="drained", notice=notice)
            sent = self._system.ref(running.address).tell(drain) is SendOutcome.QUEUED
            if sent and (notice or self._is_lent):  # one that is lent goes by itself, and its process stays
                await self._gone(name, deadline_s)
        await rollout.remove_child(name, cause=ExitCause.PREEMPTED)
        self._processes.release(name)
        return True

    async def _gone(self, name: str, within_s: float) -> None:
        """Until a worker has ended by itself, or its time is over."""
        gone = self._leaving.setdefault(name, asyncio.Event())
        try:
            async with asyncio.timeout(within_s):
                await gone.wait()
        except TimeoutError:
            self._news.say(message=f"{name} has not gone within the {within_s:.1f} s of its notice")
        finally:
            self._leaving.pop(name, None)

    async def drain_node(self, node: str) -> int:
        """Move every rollout worker off ``node``; returns how many."""
        if (rollout := self._supervisors.get("rollout")) is None:
            return 0
        moved = [info.name for info in _workers(rollout) if info.node == node]
        for name in moved:
            await self.drain_worker(name)
        await self.scale(self.workers_wanted)
        return len(moved)

    # ------------------------------------------------------------ what supervisors tell

    def _on_supervision(self, event: SupervisionEvent) -> None:
        fields: dict[str, float | int | str] = {"child": event.child, "supervisor": event.supervisor}
        fields |= {"cause": str(event.cause or ""), "detail": event.detail, "incarnation": event.incarnation}
        fields["at_s"] = round(event.at_s, 6)  # the clock by which budgets go; the line's own time is the wall's
        self._news.record(f"child_{event.kind}", **fields)
        if event.kind == "started" and event.child == f"scheduler.{self._job.name}":
            self._resumed = False
        if event.kind in ("exited", "stopped") and (gone := self._leaving.get(event.child)) is not None:
            gone.set()
        of_rollout = event.supervisor == f"rollout.{self._job.name}"
        if event.kind == "exited" and of_rollout:
            self._tell_end(event)
        if event.kind == "started" and self._pool is not None:
            self._pool.worker_started(event.child)
        if self._functions is not None and of_rollout and (event.kind == "exited" or not follows(event.child)):
            self._functions.worker_changed(leader_of(event.child), event.kind)
        if event.kind in ("started", "adopted") and event.child == "trainer" and self._moves is not None:
            self._moves.trainer_started()
        if event.kind == "ended":
            self._nodes.release(f"{self._job.name}.{event.child}")  # it is not started again: others may have its place
            if self._pool is not None and event.cause is not None:
                self._pool.worker_ended(event.child, event.cause)
        if event.kind == "restarting" or (
            event.kind == "start_failed" and not event.permanent
        ):  # else the run's end says
            self._news.say(message=failure_in_words(event))

    def _tell_end(self, event: SupervisionEvent) -> None:
        """To the scheduler, which sees a link break and cannot know why. The end of a rank is that of its worker."""
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


def _workers(rollout: Supervisor) -> list[ChildInfo]:
    """The rollout workers, each by its leader if it has several ranks."""
    return [info for info in rollout.snapshot() if not follows(info.name)]
