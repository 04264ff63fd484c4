"""What the supervisors ask of the machine they run on: links, processes, a disk for the journal, places, locks.

One object a machine, handed to Head, NodeProcess and NodeAgent. ``LocalMachine`` is this one; the simulated one lies in
``simulation/machine.py``, so that the same supervisors run under virtual time.
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
from configs.schema import JobConfig, MetricsConfig
from supervisors.faults.journal_faults import FaultableJournal
from supervisors.machine.devices import NO_DEVICES, Devices
from supervisors.machine.process import Child, Launch, is_stopped_by_signal, launch
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
JOURNAL = "journal.db"
"""File name of a journal, in the run directory."""


class Machine(Protocol):
    """See the module's docstring."""

    @property
    def slots(self) -> int:
        """Rollout workers that it can take without being told."""
        ...

    @property
    def devices(self) -> Devices:
        """What it has to compute on beside its cores."""
        ...

    def runtime_directory(self) -> Path:
        """A fresh directory that only this user can enter, with a short path."""
        ...

    def transport(
        self, name: str, *, listen: str, cluster: str, limits: Limits, keys: NodeKeys | None, role: str
    ) -> Transport:
        """A transport for a peer called ``name``, a new life of it; not started."""
        ...

    def launch(self, spec: Launch) -> Child:
        """Start a process. Raises OSError: it cannot be started."""
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
    """The local machine is this one: ZeroMQ, exec, SQLite. Two sets are a nemesis's, and empty without one."""

    def __init__(self, devices: Devices = NO_DEVICES) -> None:
        self._devices = devices
        self.slowed: set[int] = set()
        """Processes that are stopped and continued many times a second: they are slow, not hung."""
        self.full_disks: set[Path] = set()
        """Journals that take nothing more."""

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

    def launch(self, spec: Launch) -> Child:
        seen = self._devices.environment(spec.devices)
        return launch(dataclasses.replace(spec, env={**spec.env, **seen}) if seen else spec)

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
    """Where a nemesis notes which processes it slows down; what a simulated machine does not look at."""
    return machine.slowed if isinstance(machine, LocalMachine) else set()
