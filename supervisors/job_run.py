"""One job on the cluster: its tree is built, watched and taken down here.

start   model ready ─▶ core (metrics, scheduler, job) ─▶ services and rollout workers, a process each
wait    until the job is done, a supervisor gives up, or the operator interrupts
stop    rollout ─▶ services ─▶ core ─▶ what is left in shared memory is removed
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.core.context import Context
from actors.core.errors import AskError
from actors.core.ref import ActorRef
from actors.core.system import ActorSystem
from actors.jobs.job import Job
from actors.jobs.messages import CancelJob, JobEvent, JobReport, JobState
from actors.jobs.stop_tokens import stop_token_ids
from actors.metrics.messages import Event
from actors.roles import RoleArgs
from actors.rollout.messages import Drain
from actors.scheduler.messages import WorkerEnded
from actors.scheduler.scheduler import Scheduler
from actors.weights.segments import remove_segments
from configs.schema import JobConfig
from supervisors.adoption import adopt
from supervisors.children import ChildSpec, Running, actor_child, process_child
from supervisors.cost_meter import CostMeter
from supervisors.elastic_pool import ElasticPool
from supervisors.errors import NoNode
from supervisors.machine import LOCAL, Machine
from supervisors.messages import ChildInfo
from supervisors.model_preparation import Preparation
from supervisors.nodes import Nodes
from supervisors.restart_budget import ExitCause, RestartPolicy
from supervisors.strategies import Strategy
from supervisors.strays import Strays
from supervisors.supervisor import SupervisionEvent, Supervisor
from transport.address import ActorAddress
from transport.errors import HeadraceError

OnProgress = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class FormerLife:
    """What is known of the head that ran this job before this one, and whose processes may still run."""

    ended: str
    """How it ended, for people."""
    restarts: int = 0
    """Restarts up to then, its own among them."""
    workers: int = 0
    """Rollout workers that were wanted last; 0: as the job file says."""


class JobRun:
    """A submitted job. ``start`` it, ``wait`` for its end, ``stop`` it in any case."""

    def __init__(
        self,
        system: ActorSystem,
        nodes: Nodes,
        job: JobConfig,
        run_dir: Path,
        *,
        resume: bool,
        on_progress: OnProgress | None,
        machine: Machine = LOCAL,
        former: FormerLife | None = None,
    ) -> None:
        self._machine = machine
        self._former = former
        self._looked_for: set[str] = set()
        self._pool: ElasticPool | None = None
        self._cost: CostMeter | None = None
        self._stop_counting: Callable[[], None] = lambda: None
        self._strays = Strays(system, nodes, job.name, self.children)
        self.job, self.run_dir = job, run_dir
        self._system, self._nodes, self._resume = system, nodes, resume
        self._listeners: list[OnProgress] = [on_progress] if on_progress is not None else []
        self._model_path = Path()
        self._supervisors: dict[str, Supervisor] = {}
        self._actor: Job | None = None
        self._error = ""
        self._stopped = False
        self._preparation = Preparation(job, run_dir, lambda message: self._say(message=message))
        self.workers_wanted = former.workers if former is not None and former.workers else job.rollout.workers

    @property
    def continued(self) -> bool:
        """A head before this one has begun with it."""
        return self._former is not None

    # ------------------------------------------------------------ start

    async def start(self, interrupted: asyncio.Event) -> bool:
        """Build the tree and wait until every process is ready. False: interrupted while the model was prepared.

        Raises:
            HeadraceError: the model could not be had, a node is missing, or a process never became ready.
        """
        job, run_dir = self.job, self.run_dir
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        if self._former is None:
            remove_segments(run_dir)
            self._say(state="starting", steps=job.steps, run_dir=str(run_dir), message="preparing the model")
        # the model is there when there was a head before, and an interrupted run is to take its checkpoint
        model_path = await self._preparation.run(interrupted if self._former is None else asyncio.Event())
        if model_path is None:
            self._say(state=str(self.state), message="interrupted before it began")
            return False
        self._model_path = model_path
        stop_tokens = stop_token_ids(self._model_path, job.rollout.stop)
        if job.cluster.nodes:
            await self._wait_for_nodes()
        if job.cluster.prices:
            self._count_cost()
        await self._start_core(stop_tokens)
        if self._former is None:
            self._say(
                message=f"starting {job.rollout.workers} rollout workers, trainer, weight server and reward worker"
            )
        else:
            self._record("head_restarted", restarts=self._former.restarts, why=self._former.ended)
        await self._start_processes()
        if self._former is not None:
            self._strays.start()
        return True

    async def _wait_for_nodes(self) -> None:
        """Those that the job wants; after a restart, those that come back soon, with what they run."""
        count, wait_s = self.job.cluster.nodes, self.job.cluster.wait_s
        if self._former is None:
            await self._nodes.wait_for_remote(count, wait_s)
            return
        with contextlib.suppress(NoNode):
            await self._nodes.wait_for_remote(count, min(wait_s, self.job.limits.connect_timeout_s))

    def _count_cost(self) -> None:
        """From now on, what the machines that are there cost."""
        self._cost = cost = CostMeter(self.job.cluster.prices, asyncio.get_running_loop().time)

        def look() -> None:
            for kind in cost.see([node.kind for node in self._nodes.present]):
                self._record("kind_without_price", kind=kind)

        self._stop_counting = self._nodes.subscribe(look)
        look()

    async def _start_core(self, stop_tokens: tuple[int, ...]) -> None:
        name, job, run_dir = self.job.name, self.job, self.run_dir

        def make_job() -> Job:
            self._actor = Job(
                job,
                self._address("scheduler"),
                self._address("metrics"),
                run_dir=run_dir,
                stop_token_ids=stop_tokens,
                restarts=self.restarts,
                spent=self._cost.spent if self._cost is not None else None,
            )
            self._actor.subscribe(self._on_job_event)
            return self._actor

        metrics = self._address("metrics")

        def make_scheduler() -> Scheduler:
            return Scheduler(job, run_dir, self._machine.journal(job, run_dir), metrics)

        core = [
            actor_child(f"metrics.{name}", lambda: self._machine.metrics(job, run_dir), node="head", role="metrics"),
            actor_child(f"scheduler.{name}", make_scheduler, node="head", role="scheduler"),
            actor_child(f"job.{name}", make_job, node="head", role="job"),
        ]
        await self._supervise("core", Strategy.REST_FOR_ONE, core)

    async def _start_processes(self) -> None:
        services = [
            self._process("weights", "weights", "local"),
            self._process("rewards", "rewards", "local"),
            self._process("trainer", "trainer", "local", RestartPolicy.TRANSIENT),  # it ends when the last step is done
        ]
        if self.job.rollout.length_ranking == "learned":
            services.append(self._process("ranker", "ranker", "local"))
        workers = [self._worker(index) for index in range(self.workers_wanted)]
        await asyncio.gather(
            self._supervise("services", Strategy.ONE_FOR_ONE, services),
            self._supervise("rollout", Strategy.ONE_FOR_ONE, workers),
        )
        self._say(message="every process is ready", processes="ready")
        if self._pool is not None:
            self._pool.start()

    async def _supervise(self, part: str, strategy: Strategy, children: list[ChildSpec]) -> None:
        name = f"{part}.{self.job.name}"
        supervisor = Supervisor(name, strategy, children, on_event=self._on_supervision)
        self._supervisors[part] = supervisor
        if part == "rollout" and self.job.cluster.place_rollout == "elastic":
            self._pool = self._elastic_pool(supervisor)
        await self._system.spawn(name, supervisor)
        await supervisor.ready(self.job.limits.ready_timeout_s * self.job.limits.start_attempts_max)

    def _worker(self, index: int) -> ChildSpec:
        place = self.job.cluster.place_rollout
        return self._process(f"rollout-{index}", "rollout", "local" if place == "elastic" else place)

    def _elastic_pool(self, supervisor: Supervisor) -> ElasticPool:
        def make(worker: str, node: str) -> ChildSpec:
            return self._process(worker, "rollout", f"node:{node}", RestartPolicy.TEMPORARY)

        return ElasticPool(
            self._nodes, supervisor, make, self.drain_worker, self._record, limits=self.job.limits,
            now=asyncio.get_running_loop().time,
        )  # fmt: skip

    def _process(self, name: str, role: str, place: str, restart: RestartPolicy = RestartPolicy.PERMANENT) -> ChildSpec:
        """A role process on the machine that ``place`` asks for (``Nodes.choose``); chosen anew for each start."""
        args = RoleArgs(
            role=role,
            name=name,
            node="",
            job=self.job.model_dump_json(),
            model_path=str(self._model_path),
            run_dir=str(self.run_dir),
            scheduler=self._address("scheduler"),
            metrics=self._address("metrics"),
        )
        limits, process = self.job.limits, f"{self.job.name}.{name}"

        async def start(context: Context) -> Running:
            if self._former is not None and name not in self._looked_for:
                self._looked_for.add(name)
                if (running := await adopt(context, self._nodes, process, name)) is not None:
                    return running
            node = await self._nodes.choose(process, place, self.job.cluster.wait_s)
            agent: ActorRef = context.ref(node.agent)
            return await process_child(args, agent, job=self.job.name, ready_s=limits.ready_timeout_s).start(context)

        ready_s = limits.ready_timeout_s + self.job.cluster.wait_s
        return ChildSpec(name, start, role=role, restart=restart, shutdown_s=limits.stop_timeout_s, ready_s=ready_s)

    def _address(self, part: str) -> ActorAddress:
        return self._system.address(f"{part}.{self.job.name}")

    # ------------------------------------------------------------ wait and stop

    async def wait(self, interrupted: asyncio.Event) -> dict[str, Any]:
        """Until the job is done; the first set of ``interrupted`` asks for a checkpoint and an early end.

        Returns the summary. A failure of the tree is in it, not raised.
        """
        assert self._actor is not None, "start the run first"
        ends = [
            asyncio.create_task(self._until_done(), name="job done"),
            asyncio.create_task(self._until_failed(), name="failed"),
        ]
        watcher = asyncio.create_task(self._until_interrupted(interrupted), name="interrupted")
        finished = asyncio.Event()
        for task in ends:
            task.add_done_callback(lambda _: finished.set())
        try:
            await finished.wait()  # bounded by the job itself: its steps, its supervisors, its operator
        finally:
            for task in (*ends, watcher):
                task.cancel()
        return self.summary()

    async def _until_done(self) -> None:
        while self._actor is not None and not self.state.over:
            await self._actor.wait_over()

    async def _until_failed(self) -> None:
        """Return when a supervisor has given up; the reason becomes the job's error."""
        ended = asyncio.Event()
        tasks = [
            asyncio.create_task(self._system.wait_stopped(f"{part}.{self.job.name}"), name=f"{part} supervisor")
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
        self.fail("; ".join(str(error) for error in errors if error is not None) or "the job's tree was stopped")

    async def _until_interrupted(self, interrupted: asyncio.Event) -> None:
        await interrupted.wait()
        self._say(message="interrupted: finishing the step and taking a checkpoint; once more to end at once")
        await self.interrupt()

    def fail(self, why: str) -> None:
        """The job could not be started or kept; the reason is part of its summary."""
        self._error = self._error or why
        self._publish({"state": "failed", "message": why})

    def abandon(self) -> bool:
        """End a run whose model is still being prepared, as interrupted; False if it is past that."""
        return self._preparation.abandon()

    async def interrupt(self) -> None:
        """Ask for a checkpoint and the end; ``wait`` returns when it is done."""
        try:
            await self._system.ref(self._address("job")).ask(CancelJob(job=self.job.name), JobReport)
        except AskError as error:
            self._error = f"could not be interrupted in good order: {error}"

    async def stop(self) -> None:
        """Take the tree down, youngest first, and remove what is left in shared memory. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        if self._pool is not None:
            self._pool.stop()
        self._stop_counting()
        self._strays.stop()
        for part in ("rollout", "services", "core"):
            name = f"{part}.{self.job.name}"
            if name in self._system.actors():
                await self._system.stop_actor(name)
        remove_segments(self.run_dir)

    # ------------------------------------------------------------ operators

    @property
    def state(self) -> JobState:
        if self._error:
            return JobState.FAILED
        if self._preparation.abandoned:
            return JobState.INTERRUPTED
        return self._actor.state if self._actor is not None else JobState.SUBMITTED

    def summary(self) -> dict[str, Any]:
        """What ``headrace run --json`` ends with."""
        known: dict[str, Any] = {"job": self.job.name, "steps": 0}
        if self._actor is not None:
            known = dict(self._actor.result())
        return known | {"state": str(self.state)} | ({"error": self._error} if self._error else {})

    async def scale(self, workers: int) -> None:
        """Set the number of rollout workers. Those that leave hand their samples back first."""
        rollout = self._supervisors["rollout"]
        of_pool = self._pool.workers if self._pool is not None else set[str]()
        present = {info.name for info in rollout.snapshot()} - of_pool
        self.workers_wanted = workers
        self._say(workers=workers)
        for index in range(workers):
            if f"rollout-{index}" not in present:
                rollout.add_child(self._worker(index))
        for name in sorted(present - {f"rollout-{index}" for index in range(workers)}):
            await self.drain_worker(name)

    async def drain_worker(self, name: str) -> bool:
        """Have a worker hand back its samples, then remove it; False if there is none of that name."""
        rollout = self._supervisors["rollout"]
        if name not in {info.name for info in rollout.snapshot()}:
            return False
        running = rollout.running(name)
        if running is not None:
            deadline_s = self.job.limits.stop_timeout_s
            drain = Drain(job=self.job.name, deadline_s=deadline_s, reason="drained")
            self._system.ref(running.address).tell(drain)
        await rollout.remove_child(name, cause=ExitCause.PREEMPTED)
        self._nodes.release(f"{self.job.name}.{name}")
        return True

    async def drain_node(self, node: str) -> int:
        """Move every rollout worker off ``node``; returns how many."""
        moved = [info.name for info in self._supervisors["rollout"].snapshot() if info.node == node]
        for name in moved:
            await self.drain_worker(name)
        await self.scale(self.workers_wanted)
        return len(moved)

    def signal_worker(self, name: str, number: signal.Signals) -> None:
        """For fault injection on this machine: a raw signal to the process of ``name``."""
        os.kill(self.pid_of(name), number)

    def pid_of(self, name: str) -> int:
        for info in self.children():
            if info.name == name:
                return info.pid
        raise KeyError(name)

    def children(self) -> list[ChildInfo]:
        """Every supervised actor of the job, supervisors' order."""
        return [info for supervisor in self._supervisors.values() for info in supervisor.snapshot()]

    @property
    def supervisors(self) -> Mapping[str, Supervisor]:
        return self._supervisors

    def address(self, part: str) -> ActorAddress:
        """Of ``scheduler``, ``job`` or ``metrics``."""
        return self._address(part)

    # ------------------------------------------------------------ telling

    def subscribe(self, listener: OnProgress) -> Callable[[], None]:
        """Hear of every progress map from now on; returns how to stop."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def say(self, message: str) -> None:
        """Tell whoever listens, for people."""
        self._say(message=message)

    def _say(self, **progress: Any) -> None:
        self._publish(progress)

    def _publish(self, progress: Mapping[str, Any]) -> None:
        for listener in list(self._listeners):
            listener(progress)

    def restarts(self) -> int:
        """Restarts of all of the job's actors and processes."""
        before = self._former.restarts if self._former is not None else 0
        return before + sum(supervisor.restarts for supervisor in self._supervisors.values())

    def _on_job_event(self, event: JobEvent) -> None:
        if event.kind == "step":
            self._say(**{**event.fields, "step": int(event.fields["step"]) + 1})
        elif event.kind == "state":
            self._say(state=event.fields["state"])

    def _on_supervision(self, event: SupervisionEvent) -> None:
        fields: dict[str, float | int | str] = {"child": event.child, "supervisor": event.supervisor}
        fields |= {"cause": str(event.cause or ""), "detail": event.detail, "incarnation": event.incarnation}
        fields["at_s"] = round(event.at_s, 6)  # the clock by which budgets go; the line's own time is the wall's
        self._record(f"child_{event.kind}", **fields)
        if event.kind == "exited" and event.supervisor == f"rollout.{self.job.name}":
            self._tell_end(event)
        if event.kind == "ended" and self._pool is not None and event.cause is not None:
            self._pool.worker_ended(event.child, event.cause)
        if event.kind in ("restarting", "gave_up", "start_failed"):
            self._say(message=f"{event.child} {event.kind.replace('_', ' ')}: {event.cause} {event.detail}")

    def _tell_end(self, event: SupervisionEvent) -> None:
        """To the scheduler, which sees a link break and cannot know why."""
        crashed = event.cause is ExitCause.CRASHED
        news = WorkerEnded(
            job=self.job.name, worker=event.child, incarnation=event.incarnation, crashed=crashed, detail=event.detail
        )
        self._system.ref(self._address("scheduler")).tell(news)

    def _record(self, name: str, **fields: float | str) -> None:
        """Into events.jsonl."""
        try:
            self._system.ref(self._address("metrics")).tell(Event(job=self.job.name, name=name, fields=dict(fields)))
        except HeadraceError:
            pass  # the metrics actor itself is what ended
