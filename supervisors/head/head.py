"""The head: one actor system, the register of nodes, and the jobs.

Head.start ─▶ transport ─▶ system ─▶ nodes · node agent, unless it lives elsewhere ─▶ control server
Head.launch ─▶ JobRun (job_run.py), followed to its end
Head.begin_services ─▶ a supervised process each (services.py), places for jobs (admission.py)
Head.begin_serving  ─▶ the model server and its samplers (serving.py)
Head.stop ─▶ jobs ─▶ serving ─▶ services ─▶ control ─▶ system (the node agent stops its processes) ─▶ transport
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import structlog

from actors.control.server import ControlServer
from actors.control.socket import open_control_socket
from actors.core.system import ActorSystem
from actors.protocol.batches import Progress, QueryProgress
from actors.protocol.who_may_send import guard_for
from configs.limits import DEFAULT_LIMITS, Limits
from configs.schema import JobConfig
from configs.services import ServicesConfig
from configs.serving import ServingConfig, service_for
from supervisors.faults.node_faults import NAME as NODE_FAULTS
from supervisors.faults.node_faults import NodeFaults
from supervisors.faults.process_faults import faults_of
from supervisors.head.head_keys import load_head_keys
from supervisors.head.job_register import JobRegister
from supervisors.head.operations import Operations
from supervisors.jobs.job_run import FormerLife, JobRun
from supervisors.machine.machine import CLUSTER, LOCAL, Machine, slowed_by
from supervisors.machine.membership.nodes import Nodes
from supervisors.machine.node_agent import NodeAgent, NodeOptions
from supervisors.machine.run_directory import DirectoryLock
from supervisors.machine.runtime_directory import remove_runtime_directory
from supervisors.nemesis.fault_schedule import FaultSchedule, JobFaults
from supervisors.nemesis.nemesis import Nemesis
from supervisors.pool.slot_shares import WHOLE, PoolShare, SlotShares
from supervisors.serving.serving import Serving
from supervisors.sharing.admission import Admission
from supervisors.sharing.service_register import ServiceRegister
from supervisors.sharing.services import Services
from transport.address import ActorAddress
from transport.errors import HeadraceError
from transport.zmq.own_keys import directory_or_own

log = structlog.get_logger("headrace.head")

_NOT_GENERATED: Final = ("queued", "assigned", "streaming")
"""States of samples that are not fully generated yet."""


class Head:
    """A head runs jobs: create it, ``start`` it, ``launch`` jobs, ``stop`` it."""

    def __init__(
        self,
        *,
        run_root: Path,
        listen: str | None = None,
        keys: Path | None = None,
        control_keys: Path | None = None,
        limits: Limits = DEFAULT_LIMITS,
        machine: Machine = LOCAL,
        agent: ActorAddress | None = None,
        allow_functions: tuple[str, ...] | None = None,
        services_dir: Path | None = None,
    ) -> None:
        """Args:
        agent: this machine's node agent, if another process hosts it (``machine_process.py``); then ``listen`` is
            needed, and is the same in every life of this head. None: this process hosts it.
        allow_functions: prefixes of the functions that jobs from the control socket may name; None: any.
        services_dir: where the training services have their files; None: in ``run_root``.
        """
        self.machine = machine
        self.limits = limits
        self.allow_functions = allow_functions
        self.run_root = run_root
        owner = str(agent.peer) if agent is not None else ""
        self.register = JobRegister(run_root, owner)
        self.jobs: dict[str, JobRun] = {}
        self.nemeses: dict[str, Nemesis] = {}
        """Nemeses by job, each for as long as the job's processes are there."""
        self._keys_directory = directory_or_own(keys, listen or "", "nodes")
        self._control_keys = control_keys
        self._keys = load_head_keys(self._keys_directory, control_keys)
        self._agent = agent
        self._runtime = self.machine.runtime_directory() if agent is None else None
        self._listen = listen or f"ipc://{self._runtime}/head"
        self.nodes = Nodes("head", self._keys.nodes.registered if self._keys.nodes else ())
        beside = services_dir or run_root
        self.services = Services(
            self.nodes, machine, beside, limits=limits, on_news=self._tell_its_jobs,
            on_ready=lambda service: self.admission.service_is_ready(service),
        )  # fmt: skip
        self.service_register = ServiceRegister(beside, owner, on_news=self._tell_all_that_share)
        self.serving: Serving | None = None
        self.admission = Admission(self.services, self.service_register, on_move=self._move_trainer)
        self.system: ActorSystem
        self._control: ControlServer | None = None
        self._followers: dict[str, asyncio.Task[dict[str, Any]]] = {}
        """Tasks that follow a job, by its name, until its tree is down."""
        self._listeners: list[Callable[[JobRun], None]] = []
        self._interrupted = asyncio.Event()
        self._shares = SlotShares(limits, lambda place: self.nodes.owner_of(place.removeprefix("rollout-")))
        self._moves: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen, and start this machine's node agent unless it runs already."""
        transport = self.machine.transport(
            "head", listen=self._listen, cluster=CLUSTER, limits=self.limits, keys=self._keys.nodes, role="head"
        )
        self.system = ActorSystem(transport, limits=self.limits, guard=guard_for(transport.peer))
        await self.system.start()
        await self.system.spawn("nodes", self.nodes)
        await self.system.spawn(NODE_FAULTS, NodeFaults(faults_of(transport), slowed_by(self.machine)))
        agent = self._agent if self._agent is not None else await self._start_agent()
        self.nodes.add_local("head", agent, self.machine.slots, self.machine.devices.ids)

    async def begin_services(self, rules: ServicesConfig | None, *, former: bool) -> None:
        """Start the services of ``rules``; after a ``former`` life of this head, take over those that it had."""
        self.services.open(self.system, adopting=former)
        if former and self.service_register.read():
            self.admission.go_on()
        else:
            self.service_register.begin(rules or ServicesConfig(services=[]))
        recorded = self.service_register.now
        for config in recorded.rules.services:
            await self.services.begin(config, draining=config.name in recorded.draining)

    async def begin_serving(self, config: ServingConfig, *, former: bool, say: Callable[[str], None]) -> None:
        """Serve models by one of the services that were begun, also those that a ``former`` life has served.

        Raises:
            ConfigError: there is no such service.
        """
        service = service_for(config, self.service_register.now.rules)
        self.serving = Serving(
            self.nodes, self.machine, self.services, config, service, limits=self.limits, say=say
        )  # fmt: skip
        await self.serving.begin(self.system, adopting=former)

    def _tell_its_jobs(self, service: str, news: str) -> None:
        for job, place in self.admission.places.items():
            if place.service == service and job in self.jobs:
                self.jobs[job].say(news)
        if self.serving is not None:
            self.serving.service_news(service, news)
        self.admission.decide()

    def _tell_all_that_share(self, news: str) -> None:
        for run in self.jobs.values():
            if run.job.trainer.service is not None and not run.state.over:
                run.say(news)

    def _move_trainer(self, job: str) -> None:
        """Move the trainer of ``job`` in the background, and decide about places anew once it has moved."""
        task = asyncio.create_task(self._moving(job), name=f"move the trainer of {job}")
        self._moves.add(task)
        task.add_done_callback(self._moved)

    async def _moving(self, job: str) -> None:
        try:
            await self.jobs[job].move_trainer()
        finally:
            self.admission.decide()

    def _moved(self, task: asyncio.Task[None]) -> None:
        self._moves.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:  # its supervisor starts it again
            log.error("a trainer was not moved in good order", exc_info=error)

    async def _start_agent(self) -> ActorAddress:
        options = NodeOptions(
            listen=f"ipc://{self._runtime}/{{name}}" if self._listen.startswith("ipc://") else "",
            keys=str(self._keys_directory or ""),
            machine=self.machine,
        )
        return (await self.system.spawn("agent", NodeAgent("head", options))).address

    @property
    def endpoint(self) -> str:
        """Endpoint where nodes join."""
        return self.system.endpoint

    async def serve_control(self, endpoint: str) -> str:
        """Open the control socket at ``endpoint``; returns where it is."""
        directory = directory_or_own(self._control_keys, endpoint, "control")
        keys = load_head_keys(self._keys_directory, directory).control
        open_socket = open_control_socket(endpoint, self.limits, keys=keys)
        server = ControlServer(Operations(self), open_socket, limits=self.limits)
        await server.start()
        self._control = server
        return server.endpoint

    def launch(
        self,
        job: JobConfig,
        run_dir: Path,
        former: FormerLife | None = None,
        *,
        alone: bool = False,
        faults: JobFaults | None = None,
        machines: str = "",
    ) -> asyncio.Task[dict[str, Any]]:
        """Start a job and follow it to its end, without waiting for either. It is noted for a next life of this head.

        Returns a task whose result is the job's summary; a job that could not be started is ``failed`` there.

        Args:
            former: what is known of the head before this one, if that has begun with the job.
            alone: the head is for this job only: the directory is locked already, and nothing is shared or noted.
            faults: faults to inject; ``faults`` in the summary counts strikes injected, failed and skipped.
            machines: beginning of the names of nodes that are this job's alone; empty: there are none.

        Raises:
            DirectoryInUse: another run lives in that directory.
            OSError: the job cannot be noted, and nothing has begun.
        """
        lock = None if alone else self._lock(run_dir)
        if machines:
            self.nodes.reserve(machines, job.name)
        share = WHOLE if alone else self._shares.of(job.name, lambda: self._samples_left(job.name))
        run = self._begin(job, run_dir, former, share, machines)
        task = asyncio.create_task(self._follow(run, faults), name=f"job {job.name}")
        self._followers[job.name] = task
        task.add_done_callback(lambda _: self._forget(job.name, lock, task))
        return task

    def _lock(self, run_dir: Path) -> DirectoryLock:
        lock = self.machine.lock(run_dir, os.getpid() if self._agent is None else os.getppid())
        try:
            self.register.add(run_dir)
        except OSError:
            lock.release()
            raise
        return lock

    def _forget(self, job: str, lock: DirectoryLock | None, task: asyncio.Task[dict[str, Any]]) -> None:
        """Forget a launched job that has ended; its tree is down unless taking it down has failed."""
        if self._followers.get(job) is task:
            del self._followers[job]
        if lock is not None:
            lock.release()
            self._strike_out(job, lock.run_dir)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a job was not taken down in good order", job=job, exc_info=error)

    def _strike_out(self, job: str, run_dir: Path) -> None:
        try:
            self.register.remove(run_dir)
        except OSError as error:
            log.exception("a next life of this head may begin again with a job that is over", job=job, why=str(error))

    async def name_is_free(self, job: str) -> bool:
        """Wait until a launched job of that name is down, since its actors use the name; False: it takes too long."""
        if (task := self._followers.get(job)) is None:
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.limits.stop_timeout_s):
                await asyncio.gather(asyncio.shield(task), return_exceptions=True)  # how it ends is told elsewhere
        return task.done()

    async def _samples_left(self, job: str) -> float:
        """Number of samples of open steps that are not generated yet."""
        scheduler = self.system.ref(self.system.address(f"scheduler.{job}"))
        states = (await scheduler.ask(QueryProgress(job=job), Progress)).states
        return float(sum(states.get(state, 0) for state in _NOT_GENERATED))

    def _begin(
        self, job: JobConfig, run_dir: Path, former: FormerLife | None, share: PoolShare, machines: str
    ) -> JobRun:
        run = self.jobs[job.name] = JobRun(
            self.system, self.nodes, job, run_dir,
            machine=self.machine, former=former, places=self.admission, share=share, machines=machines,
        )  # fmt: skip
        if job.trainer.service is not None:
            self.admission.submitted(job.name)
            run.subscribe(lambda progress: self.admission.heard(job.name, progress))
        for listener in list(self._listeners):
            listener(run)
        return run

    def subscribe(self, listener: Callable[[JobRun], None]) -> Callable[[], None]:
        """Call ``listener`` with each new job from now on, before it says anything; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    async def _follow(self, run: JobRun, faults: JobFaults | None = None) -> dict[str, Any]:
        told: dict[str, Any] = {}
        try:
            nemesis = self.nemeses[run.job.name] = Nemesis(self, run)
            if await run.start(self._interrupted):
                told = await self._wait(run, nemesis, faults)
        except (HeadraceError, TimeoutError, OSError) as error:
            run.fail(str(error) or repr(error))
        except Exception as error:  # noqa: BLE001  a head that crashed here would crash again in each life
            self._unforeseen(run, error)
        finally:
            if (nemesis := self.nemeses.pop(run.job.name, None)) is not None:
                nemesis.stop()
            await run.stop()
        return run.summary() | told

    def _unforeseen(self, run: JobRun, error: Exception) -> None:
        """Let an unexpected error end this job, not the others."""
        log.error("the run of a job failed", job=run.job.name, exc_info=error)
        run.fail(repr(error))

    async def _wait(self, run: JobRun, nemesis: Nemesis, faults: JobFaults | None) -> dict[str, Any]:
        """Wait until the job is over; returns what has become of its ``faults``, if it has any."""
        if faults is None:
            await run.wait(self._interrupted)
            return {}
        schedule = FaultSchedule(nemesis, run, faults, continued=run.continued)
        schedule.start()
        try:
            await run.wait(self._interrupted)
        finally:
            told = schedule.stop()
        return {"faults": told}

    async def interrupt_jobs(self) -> None:
        """Ask every running job for a checkpoint, and wait for their ends."""
        self._interrupted.set()
        for task in list(self._followers.values()):
            await task

    async def stop(self) -> None:
        """Stop everything, youngest first. Idempotent."""
        self._shares.stop()
        for task in [*self._followers.values(), *self._moves]:
            task.cancel()
        for run in reversed(list(self.jobs.values())):
            await run.stop()
        self.admission.close()
        if self.serving is not None:
            await self.serving.stop()
        await self.services.stop()
        if self._control is not None:
            await self._control.stop()
            self._control = None
        await self.system.stop()
        if self._runtime is not None:
            remove_runtime_directory(self._runtime)
