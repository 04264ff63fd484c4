"""A simulated machine, and the processes launched on it: role processes and heads.

``SimulatedMachine`` implements ``Machine`` for the supervisors that run on it. It has a name, shared memory (its own
directory), a disk that outlives its processes, and the processes. A lock belongs to a simulated process and is released
when that process ends; a file lock would belong to the one real process that simulates them all.

launch ─ start_s ─▶ its code: child.host, head_process.lead ─▶ exit code
         SIGTERM: dies        SIGTERM: stops cleanly; a head also on SIGINT          SIGKILL, SIGSTOP, SIGCONT: as usual
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from actors.core.actor import Actor
from actors.core.reason import Reason, reason_of
from actors.core.system import ActorSystem
from actors.ledger.journal import Journal
from actors.protocol.who_may_send import guard_for
from actors.weights.segments import Host
from configs.limits import Limits
from configs.run_files import JOURNAL
from configs.schema import JobConfig, MetricsConfig
from supervisors.head.head import Head
from supervisors.head.head_messages import HeadOrder
from supervisors.head.head_process import lead
from supervisors.jobs.job_run import JobRun
from supervisors.machine.devices import NO_DEVICES
from supervisors.machine.processes.child import host
from supervisors.machine.processes.held_sockets import Listening
from supervisors.machine.processes.process import EXIT_CRASHED, EXIT_START_FAILED, Child, Launch, head_command
from supervisors.machine.processes.process_spec import ProcessSpec
from supervisors.nemesis.fault_schedule import JobFaults
from supervisors.simulation.cluster.context import Body, SimulationContext
from supervisors.simulation.cluster.journal import JournalFile, SimulatedJournal
from supervisors.simulation.cluster.roles import build_simulated_role
from supervisors.simulation.cluster.train_service import tear_stored
from supervisors.simulation.records.job_record import JobRecord, RecordedMetrics
from supervisors.tree.errors import DirectoryInUse
from transport.address import PeerId
from transport.errors import HeadraceError
from transport.memory_transport import MemoryTransport
from transport.sim.process import PROCESS, SimProcess
from transport.zmq.security import NodeKeys

P = ParamSpec("P")
R = TypeVar("R")


class SimulatedLock:
    """Keeps others out of a run directory until it is released or its owner dies."""

    def __init__(self, run_dir: Path, owner: SimProcess) -> None:
        self.run_dir = run_dir
        self._owner: SimProcess | None = owner

    @property
    def is_held(self) -> bool:
        """Whether the lock was not released, and its owner lives."""
        return self._owner is not None and self._owner.alive

    def release(self) -> None:
        """Release the lock. Idempotent."""
        self._owner = None


class SimulatedMachine:
    """Implements ``supervisors.machine.machine.Machine``, as the module's docstring says."""

    def __init__(
        self,
        world: SimulationContext,
        name: str,
        directory: Path,
        slots: int,
        kind: str = "reserved",
        notice_s: float = 0.0,
    ) -> None:
        self.world = world
        self.name = name
        self.slots = slots
        self.devices = NO_DEVICES
        self.kind = kind
        self.notice_s = notice_s
        self.host = Host(name, directory / "shm")
        self.host.memory.mkdir(parents=True)
        self.children: dict[int, SimulatedChild] = {}
        self._directory = directory
        self._rng = world.rng(f"machine {name}")
        self._files: dict[str, JournalFile] = {}
        self._locks: dict[Path, SimulatedLock] = {}

    def runtime_directory(self) -> Path:
        return self._directory / "runtime"

    def transport(
        self, name: str, *, listen: str, cluster: str, limits: Limits, keys: NodeKeys | None, role: str
    ) -> MemoryTransport:
        peer = PeerId(name, self._rng.getrandbits(62) + 1)
        transport = MemoryTransport(self.world.network, peer, listen=listen, cluster=cluster, limits=limits)
        self.world.bodies[_own_process()].transport = transport
        return transport

    # processes

    def launch(self, spec: Launch, listening: Listening | None = None) -> SimulatedChild:
        low, high = self.world.scenario.costs.start_s
        pid, start_s = self.world.new_pid(), self._rng.uniform(low, high)
        child: SimulatedChild
        if list(spec.command) == head_command():
            child = SimulatedHead(self, pid, HeadOrder.decode(spec.stdin), start_s)
        else:
            child = SimulatedRole(self, pid, ProcessSpec.decode(spec.stdin), start_s)
        self.children[pid] = child
        self.world.trace.note("start", process=child.name, pid=pid)
        return child

    def let_go(self, process: str) -> None:
        """A simulated process listens at no socket."""

    def is_stopped(self, pid: int) -> bool:
        child = self.children.get(pid)
        return child is not None and child.body.halted

    @property
    def head(self) -> SimulatedHead | None:
        """The living head process on this machine."""
        return next((child for child in self.children.values() if isinstance(child, SimulatedHead)), None)

    def forget(self, pid: int) -> None:
        self.children.pop(pid, None)

    def kill_children(self) -> None:
        """Kill all processes, as the death of their parent does (``actors/host/parent_death.py``)."""
        for child in list(self.children.values()):
            child.kill()

    def lose_power(self) -> None:
        """Lose every process, the shared memory, and what was not synced to the disk."""
        for child in list(self.children.values()):
            child.lose_power()
        for path in self.host.memory.iterdir():
            path.unlink()
        for file in self._files.values():
            lost = file.lose_power(self._rng)
            self.world.trace.note("torn_tail", job=file.job, events=lost)
        if self.name == "head" and self.world.scenario.services is not None:
            self.world.trace.note("torn_states", files=tear_stored(self.world.root, self._rng))

    # disk and records

    def journal_file(self, job: str) -> JournalFile:
        file = self._files.get(job)
        if file is None:
            trace = self.world.trace
            file = self._files[job] = JournalFile(job, lambda kind, body: trace.ledger(job, kind, body))
        return file

    def journal(self, job: JobConfig, run_dir: Path) -> Journal | None:
        (run_dir / JOURNAL).touch()  # only its existence is checked
        return SimulatedJournal(self.journal_file(job.name), job.limits, self.world.scenario.costs.disk_s)

    def metrics(self, job: JobConfig, run_dir: Path) -> Actor:
        return RecordedMetrics(self.world.record(job.name), run_dir, job.metrics)

    def service_metrics(self, name: str, directory: Path) -> Actor:
        return RecordedMetrics(JobRecord(name), directory, MetricsConfig())

    def lock(self, run_dir: Path, owner_pid: int) -> SimulatedLock:
        held = self._locks.get(run_dir)
        if held is not None and held.is_held:
            raise DirectoryInUse(f"{run_dir} is in use: a run goes on there")
        lock = self._locks[run_dir] = SimulatedLock(run_dir, _own_process())
        return lock

    async def run_blocking(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)


class SimulatedChild(Child):
    """Runs a simulated process, made by ``SimulatedMachine.launch``; subclasses say in ``main`` what it does."""

    OBEYS: tuple[int, ...] = (signal.SIGTERM,)
    """Signals that end the process cleanly; before it has loaded its code they kill it, except SIGINT."""

    def __init__(self, machine: SimulatedMachine, pid: int, name: str, start_s: float) -> None:
        super().__init__(pid, machine.world.loop)
        self.machine = machine
        self.body = Body(name, machine.host, machine.world)
        self.terminated: asyncio.Event | None = None
        """Event that a signal of ``OBEYS`` sets; None before the process has loaded its code."""
        self._pending: list[int] = []
        self._note: Reason | None = None
        self.body.life.start(self._run(start_s), f"process {name}")

    @property
    def name(self) -> str:
        return self.body.name

    def __str__(self) -> str:
        return self.name

    @property
    def role(self) -> str:
        """The role of the process, as a fault plan names it."""
        raise NotImplementedError

    async def _run(self, start_s: float) -> None:
        await asyncio.sleep(start_s)
        self.terminated = asyncio.Event()
        code = EXIT_START_FAILED
        try:
            code = await self.main(self.terminated)
        except Exception as error:  # noqa: BLE001  as in run_child: the process fails, whatever the reason
            self.leave_note(error)
            self.machine.world.trace.say("process_failed", process=self.name, error=repr(error))
        self._exit(code)

    def leave_note(self, error: BaseException) -> None:
        """Keep the error by which the process ends."""
        self._note = reason_of(error)

    def _last_words(self) -> Reason | None:
        return self._note

    async def main(self, terminated: asyncio.Event) -> int:
        """Do the process's work, and return its exit code."""
        raise NotImplementedError

    # signals

    def send_signal(self, number: int) -> None:
        if not self.running:
            return
        if number == signal.SIGSTOP:
            self.body.halt()
        elif number == signal.SIGCONT:
            self.body.go_on()
            pending, self._pending = self._pending, []
            for waiting in pending:
                self.send_signal(waiting)
        elif number == signal.SIGKILL:
            self._exit(-number)
        elif self.body.halted:
            self._pending.append(number)
        elif number in self.OBEYS and self.terminated is not None:
            self.terminated.set()
        elif number != signal.SIGINT:  # ignored by role processes, and by a head that is not ready
            self._exit(-number)

    def _signal_group(self, number: int) -> None:
        self.send_signal(number)

    def lose_power(self) -> None:
        """End the process: its machine has lost power."""
        self._exit(-signal.SIGKILL, silent=True)

    def _exit(self, code: int, *, silent: bool = False) -> None:
        if self.running:
            self.machine.world.trace.note("exit", process=self.name, pid=self.pid, code=code)
            self.body.end(silent=silent)
            self.machine.forget(self.pid)
            self._ended(code)


class SimulatedRole(SimulatedChild):
    """Runs a role process, owned by a node agent."""

    def __init__(self, machine: SimulatedMachine, pid: int, spec: ProcessSpec, start_s: float) -> None:
        self.spec = spec
        super().__init__(machine, pid, spec.peer, start_s)

    @property
    def role(self) -> str:
        return self.spec.args.role

    @property
    def actor(self) -> str:
        """The main actor's name, such as ``rollout-0``."""
        return self.spec.args.name

    @property
    def job(self) -> str:
        return self.spec.name.removesuffix(f".{self.actor}")

    async def main(self, terminated: asyncio.Event) -> int:
        spec, world = self.spec, self.machine.world
        limits = spec.parsed_limits()
        transport = self.machine.transport(
            spec.peer, listen=spec.listen, cluster=spec.cluster, limits=limits, keys=None, role=self.role
        )
        guard = guard_for(transport.peer)
        self.body.system = system = ActorSystem(transport, limits=limits, seed=world.seed, guard=guard)
        return await host(
            spec,
            system,
            lambda args: build_simulated_role(args, world, self.body),
            terminated,
            self.leave_note,
            pid=self.pid,
        )


class SimulatedHead(SimulatedChild):
    """Runs a head, owned by a machine process; ``head`` is None until it has started."""

    OBEYS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, machine: SimulatedMachine, pid: int, order: HeadOrder, start_s: float) -> None:
        self.order = order
        self.head: Head | None = None
        super().__init__(machine, pid, "head", start_s)

    @property
    def role(self) -> str:
        return "head"

    async def main(self, terminated: asyncio.Event) -> int:
        order, world = self.order, self.machine.world
        head = _WatchedHead(self)
        try:
            try:
                await head.start()
            except (HeadraceError, OSError) as error:
                world.trace.say("head_failed", error=repr(error))
                return EXIT_START_FAILED
            self.head, self.body.system = head, head.system
            return await lead(head, order, "memory://control", terminated)
        except Exception as error:  # noqa: BLE001  it becomes a finding of the run
            if self.body.alive:
                world.escaped("head", "the head failed", error)
            return EXIT_CRASHED
        finally:
            await head.stop()


class _WatchedHead(Head):
    """Head that tells the world of its jobs' progress, ends and errors."""

    def __init__(self, process: SimulatedHead) -> None:
        order = process.order
        super().__init__(
            run_root=Path(order.run_root),
            listen=order.listen,
            limits=Limits.model_validate_json(order.limits),
            machine=process.machine,
            agent=order.agent,
        )
        self._world = process.machine.world
        self._body = process.body

    def _unforeseen(self, run: JobRun, error: Exception) -> None:
        if self._body.alive:
            self._world.escaped("head", f"the run of {run.job.name} failed", error)
        super()._unforeseen(run, error)

    async def _follow(self, run: JobRun, faults: JobFaults | None = None) -> dict[str, Any]:
        run.subscribe(self._world.progress_of(run.job.name))
        summary = await super()._follow(run, faults)
        self._world.job_over(run.job.name, summary)
        return summary


def _own_process() -> SimProcess:
    process = PROCESS.get()
    assert process is not None, "only processes have links and locks"
    return process
