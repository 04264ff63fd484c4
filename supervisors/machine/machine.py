"""What the supervisors ask of the machine they run on: links, processes, a disk for the journal, directories, locks.

Each machine is one object, handed to Head, NodeProcess and NodeAgent. ``LocalMachine`` is the real one; the simulated
one, under which the same supervisors run in virtual time, is in ``simulation/cluster/machine.py``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from actors.core.actor import Actor
from actors.ledger.journal import Journal
from actors.metrics.recorder import Metrics
from configs.limits import Limits
from configs.run_files import JOURNAL
from configs.schema import JobConfig, MetricsConfig
from supervisors.faults.journal_faults import FaultableJournal
from supervisors.machine.devices import NO_DEVICES, Devices
from supervisors.machine.processes.held_sockets import HeldSockets, Listening
from supervisors.machine.processes.process import Child, Launch, is_stopped_by_signal, launch
from supervisors.machine.run_directory import DirectoryLock, RunLock
from supervisors.machine.runtime_directory import make_runtime_directory
from transport.address import new_peer
from transport.link_faults import FaultableTransport
from transport.transport import Transport
from transport.zmq.security import NodeKeys
from transport.zmq.transport import ZmqTransport

P = ParamSpec("P")
R = TypeVar("R")

CLUSTER = "headrace"
"""Peers of another cluster name are refused at the handshake."""


class Machine(Protocol):
    """Offers what supervisors need of a machine, real or simulated."""

    @property
    def slots(self) -> int:
        """Number of rollout workers that it takes unless it is told another number."""
        ...

    @property
    def devices(self) -> Devices:
        """Devices that it has beside its cores."""
        ...

    def runtime_directory(self) -> Path:
        """A fresh directory that only this user can enter, with a short path."""
        ...

    def transport(
        self, name: str, *, listen: str, cluster: str, limits: Limits, keys: NodeKeys | None, role: str
    ) -> Transport:
        """A transport for a new life of the peer ``name``; not started."""
        ...

    def launch(self, spec: Launch, listening: Listening | None = None) -> Child:
        """Start a process. ``listening``: where it listens, at sockets that this process holds for it.

        Raises:
            OSError: it cannot be started.
        """
        ...

    def let_go(self, process: str) -> None:
        """Close the sockets that are held for a process whose owner has stopped it."""
        ...

    def is_stopped(self, pid: int) -> bool:
        """Whether the process is in SIGSTOP's state."""
        ...

    def journal(self, job: JobConfig, run_dir: Path) -> Journal | None:
        """The journal of a job, not read yet; None lets the scheduler open its own, ``run_dir/journal.db``."""
        ...

    def metrics(self, job: JobConfig, run_dir: Path) -> Actor:
        """The actor that takes the job's rows, events and spans."""
        ...

    def service_metrics(self, name: str, directory: Path) -> Actor:
        """The actor that takes the events and spans of a training service."""
        ...

    def lock(self, run_dir: Path, owner_pid: int) -> DirectoryLock:
        """Lock a run directory for this process; as ``RunLock.take``."""
        ...

    async def run_blocking(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function that waits for a disk, beside the event loop."""
        ...


class LocalMachine:
    """The real machine: ZeroMQ, exec, SQLite. A nemesis fills its two sets, which are empty without one."""

    def __init__(self, devices: Devices = NO_DEVICES) -> None:
        self._devices = devices
        self._held = HeldSockets()
        self.slowed: set[int] = set()
        """Processes that are stopped and continued many times a second: they are slow, not hung."""
        self.full_disks: set[Path] = set()
        """Journals that act as if their disk were full."""

    @property
    def slots(self) -> int:
        return len(self._devices.ids) or os.cpu_count() or 1

    @property
    def devices(self) -> Devices:
        return self._devices

    def runtime_directory(self) -> Path:
        return make_runtime_directory()

    def transport(
        self, name: str, *, listen: str, cluster: str, limits: Limits, keys: NodeKeys | None, role: str
    ) -> Transport:
        links = ZmqTransport(new_peer(name), listen=listen, cluster=cluster, limits=limits, keys=keys, role=role)
        return FaultableTransport(links, limits=limits)

    def launch(self, spec: Launch, listening: Listening | None = None) -> Child:
        if listening is not None:
            spec = self._held.given(spec, listening)
        seen = self._devices.environment(spec.devices)
        return launch(dataclasses.replace(spec, env={**spec.env, **seen}) if seen else spec)

    def let_go(self, process: str) -> None:
        self._held.let_go(process)

    def is_stopped(self, pid: int) -> bool:
        return pid not in self.slowed and is_stopped_by_signal(pid)

    def journal(self, job: JobConfig, run_dir: Path) -> Journal | None:
        return FaultableJournal(run_dir / JOURNAL, job.name, job.limits, self.full_disks)

    def metrics(self, job: JobConfig, run_dir: Path) -> Actor:
        return Metrics(job.name, run_dir, job.metrics)

    def service_metrics(self, name: str, directory: Path) -> Actor:
        return Metrics(name, directory, MetricsConfig(samples=False, tensorboard=False))

    def lock(self, run_dir: Path, owner_pid: int) -> DirectoryLock:
        return RunLock.take(run_dir, owner_pid)

    async def run_blocking(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.to_thread(function, *args, **kwargs)


LOCAL = LocalMachine()


def slowed_by(machine: Machine) -> set[int]:
    """The set in which a nemesis notes the processes that it slows down; a simulated machine does not look at it."""
    return machine.slowed if isinstance(machine, LocalMachine) else set()
