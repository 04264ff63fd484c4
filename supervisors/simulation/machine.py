"""A simulated machine: implements ``Machine`` for the supervisors that believe to run on it.

What it has: a name, shared memory (a directory of its own), a disk that outlives its processes, role processes. A lock
is a simulated process's and goes with its life, as the system does it; one of a file would be all of theirs together.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from actors.core.actor import Actor
from actors.ledger.journal import Journal
from actors.weights.segments import Host
from configs.limits import Limits
from configs.schema import JobConfig, MetricsConfig
from supervisors.head.head_messages import HeadOrder
from supervisors.machine.devices import NO_DEVICES
from supervisors.machine.machine import JOURNAL
from supervisors.machine.process import Launch, head_command
from supervisors.machine.process_spec import ProcessSpec
from supervisors.simulation.children import SimulatedChild, SimulatedHead, SimulatedRole
from supervisors.simulation.ground import Ground
from supervisors.simulation.journal import JournalFile, SimulatedJournal
from supervisors.simulation.records import JobRecord, RecordedMetrics
from supervisors.simulation.train_service import tear_stored
from supervisors.tree.errors import DirectoryInUse
from transport.address import PeerId
from transport.memory_transport import MemoryTransport
from transport.sim.process import PROCESS, SimProcess
from transport.zmq.security import NodeKeys

P = ParamSpec("P")
R = TypeVar("R")


class SimulatedLock:
    """It keeps others out of a run directory for as long as its owner lives."""

    def __init__(self, run_dir: Path, owner: SimProcess) -> None:
        self.run_dir = run_dir
        self._owner: SimProcess | None = owner

    @property
    def is_held(self) -> bool:
        """Whether it is: neither released, nor its owner dead."""
        return self._owner is not None and self._owner.alive

    def release(self) -> None:
        """Idempotent."""
        self._owner = None


class SimulatedMachine:
    """See the module's docstring and ``supervisors.machine.machine.Machine``."""

    def __init__(
        self, world: Ground, name: str, directory: Path, slots: int, kind: str = "reserved", notice_s: float = 0.0
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

    def launch(self, spec: Launch) -> SimulatedChild:
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

    def is_stopped(self, pid: int) -> bool:
        child = self.children.get(pid)
        return child is not None and child.body.halted

    def forget(self, pid: int) -> None:
        """The process has ended."""
        self.children.pop(pid, None)

    def kill_children(self) -> None:
        """Their parent is dead, and their fate is its own (``actors/host/parent_death.py``)."""
        for child in list(self.children.values()):
            child.kill()

    def lose_power(self) -> None:
        """Every process and what lay in memory is gone; of the disk, what was not synced."""
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
        """The journal of ``job`` on this machine's disk."""
        file = self._files.get(job)
        if file is None:
            trace = self.world.trace
            file = self._files[job] = JournalFile(job, lambda kind, body: trace.ledger(job, kind, body))
        return file

    def journal(self, job: JobConfig, run_dir: Path) -> Journal | None:
        (run_dir / JOURNAL).touch()  # it is looked for, not read
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


def _own_process() -> SimProcess:
    process = PROCESS.get()
    assert process is not None, "only processes have links and locks"
    return process
