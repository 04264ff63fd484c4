"""Runs the machine providers that the job files of a head ask for, each from when its job's processes are up until they
are gone.

    head ── progress of a job ──▶ JobProviders ─┬─▶ JobProvider of that job ─▶ its machines: ``first-a``, ``first-b``
                                                └─▶ the terminal

They live in the machine process (``machine_process.py``), beside the head, so that machines survive the head's death.

Invariants
- A machine serves only the job whose provider started it: if the head has several jobs, the machine's name begins with
  ``machines_of(job)``, and the head reserves such names (``Nodes.reserve``).
- A provider ends its machines when its job's processes are gone, even while other jobs go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from actors.control.socket import for_others
from configs.errors import ConfigError, Problem
from configs.names import node_name_problem
from configs.run_files import LOGS
from configs.schema import JobConfig
from supervisors.providers.function_machines import FunctionMachines
from supervisors.providers.keeper import Keeper
from supervisors.providers.kubernetes.provider import KubernetesProvider
from supervisors.providers.local import LocalProvider
from supervisors.providers.ownership import Ownership, name_prefix
from supervisors.providers.provider import ClusterProvider, Provider
from supervisors.providers.replay import Replay, planned
from supervisors.providers.slurm import SlurmProvider
from supervisors.providers.slurm_script import MachineJob
from supervisors.providers.traces import SPOT, Trace, TraceEvent

Say = Callable[[Mapping[str, Any]], None]


class JobProvider:
    """Provides the machines of one run: ``open`` it, let it ``hear`` the job's progress, and ``close`` it at the end.

    ``machines``: prefix of its machines' names; empty if the head has no other job.
    """

    def __init__(self, job: JobConfig, run_dir: Path, say: Say, *, keys: Path | None, machines: str = "") -> None:
        self._job = job
        self._machines = machines
        self._open = contextlib.AsyncExitStack()
        self._run_dir = run_dir
        self._logs = run_dir / LOGS
        self._say = say
        self._keys = keys
        self._running = asyncio.Event()
        self._aimed: Replay | Keeper | None = None
        self._functions: FunctionMachines | None = None

    def hear(self, progress: Mapping[str, Any]) -> None:
        """React to the job's progress. The trace's time begins when the job's own processes are up, not before."""
        if progress.get("processes") == "ready":
            self._running.set()
        if (workers := progress.get("remote_workers")) is not None:
            self._aim(workers, str(progress.get("remote_nodes", "")).split(","))
        if (joined := progress.get("joined_nodes")) is not None and isinstance(self._aimed, Keeper):
            self._aimed.joined(str(joined).split(","))
        if self._functions is not None and (book := progress.get("functions")) is not None:
            self._functions.follow(str(book))

    async def open(self, join: str) -> None:
        """Start providing machines, which join the head at ``join``.

        Raises:
            ConfigError: the trace cannot be read or is malformed.
            ProviderError: the cluster would not start such machines.
        """
        await self._open.enter_async_context(self._providing(join))

    async def close(self) -> None:
        """End all machines. Idempotent."""
        await self._open.aclose()

    @contextlib.asynccontextmanager
    async def _providing(self, join: str) -> AsyncIterator[None]:
        spot = self._job.provider
        if spot.kind == "none":
            yield
            return
        if spot.kind == "functions":
            async with self._functions_at(for_others(join) if spot.brings_hosts else join):
                yield
            return
        if spot.brings_hosts:
            async with self._kept_at(for_others(join)):
                yield
            return
        limits, trace = self._job.limits, _named(planned(spot), self._machines)
        provider = LocalProvider(
            join=join, slots=spot.slots, logs=self._logs, limits=limits, keys=self._keys, windows=trace.windows()
        )
        self._aimed = replay = Replay(
            trace, provider, target=self._most(), on_event=self._tell, return_window_s=limits.stop_timeout_s
        )
        task = asyncio.create_task(self._follow(replay), name="replay of the trace")
        try:
            yield
        finally:
            task.cancel()
            self._aimed = None  # a head that still runs may go on to call ``hear``
            await provider.close()

    @contextlib.asynccontextmanager
    async def _kept_at(self, join: str) -> AsyncIterator[None]:
        """Keep a cluster's machines; the first are requested once the job's processes, which they join, are up."""
        owner = Ownership(self._job.name, self._run_dir)
        provider = cluster_of(self._job, join, owner.mark, self._logs, self._keys)
        await provider.open()
        most = self._most()
        assert most is not None, "the checks of the job file ask for nodes_max"
        self._aimed = keeper = Keeper(
            provider,
            owner.next_name,
            SPOT,
            target=most,
            window_s=self._job.provider.notice_s + self._job.limits.stop_timeout_s,
            limits=self._job.limits,
            tell=lambda said: self._say({"message": f"provider: {said}"}),
        )
        task = asyncio.create_task(self._begin(keeper), name="machines are kept")
        try:
            yield
        finally:
            task.cancel()
            self._aimed = None
            await keeper.close()

    async def _begin(self, keeper: Keeper) -> None:
        await self._running.wait()  # the end of the run cancels this
        keeper.begin()

    @contextlib.asynccontextmanager
    async def _functions_at(self, join: str) -> AsyncIterator[None]:
        limits = self._job.limits
        provider: Provider
        if self._job.provider.asks_slurm:
            mark = Ownership(self._job.name, self._run_dir).keep()
            provider = cluster = cluster_of(self._job, join, mark, self._logs, self._keys)
            await cluster.open()
        else:
            provider = LocalProvider(join=join, slots=1, logs=self._logs, limits=limits, keys=self._keys)
        self._functions = FunctionMachines(
            provider,
            self._job.provider.notice_s + limits.stop_timeout_s,
            lambda said: self._say({"message": f"provider: {said}"}),
        )
        try:
            yield
        finally:
            self._functions = None
            await provider.close()

    def _most(self) -> int | None:
        """Number of machines wanted at first: at most what the job can use, since one given back never returns."""
        most = self._job.scheduling.workers_max
        return self._job.provider.nodes_max if most is None else self._nodes(max(0, most - self._job.rollout.workers))

    def _aim(self, workers: int, nodes: Collection[str]) -> None:
        """The job wants ``workers`` on the provider's machines, and has some on ``nodes``."""
        if self._aimed is not None:
            self._aimed.aim(self._nodes(workers), keep=nodes)

    def _nodes(self, workers: int) -> int:
        spot = self._job.provider
        nodes = -(-workers // spot.slots)
        return nodes if spot.nodes_max is None else min(nodes, spot.nodes_max)

    async def _follow(self, replay: Replay) -> None:
        await self._running.wait()  # the end of the run cancels this
        try:
            await replay.run()
        except Exception as error:
            self._say({"message": f"provider: the trace is not replayed to its end: {error!r}"})
            raise

    def _tell(self, event: TraceEvent) -> None:
        self._say({"message": f"provider: {event.node} ({event.kind}) {event.what}"})


class JobProviders:
    """The providers of all jobs of a head. ``say``: receives the jobs' progress and the providers' messages."""

    def __init__(self, jobs: Mapping[Path, JobConfig], say: Say, *, keys: Path | None, several: bool) -> None:
        self._say = say
        self._of: dict[str, JobProvider] = {}
        self._closing: list[asyncio.Task[None]] = []
        for run_dir, job in jobs.items():
            machines = machines_of(job) if several else ""
            self._of[job.name] = JobProvider(job, run_dir, self._teller(job.name), keys=keys, machines=machines)

    def _teller(self, job: str) -> Say:
        return lambda said: self._say({"of_job": job, **said})

    def hear(self, progress: Mapping[str, Any]) -> None:
        """Pass the head's progress on to the job that it names, or to all, such as which machines have joined."""
        job = progress.get("of_job")
        for name, provider in self._of.items():
            if job in (None, name):
                provider.hear(progress)
                if progress.get("processes") == "gone":
                    self._closing.append(asyncio.create_task(provider.close(), name=f"end the machines of {name}"))
        self._say(progress)

    @contextlib.asynccontextmanager
    async def providing(self, join: str) -> AsyncIterator[None]:
        """Provide machines, which join the head at ``join``, within this context. Raises as ``JobProvider.open``."""
        try:
            for provider in self._of.values():
                await provider.open(join)
            yield
        finally:
            closes = (*self._closing, *(provider.close() for provider in self._of.values()))
            ended = await asyncio.gather(*closes, return_exceptions=True)  # each, even if another fails
            if failed := [error for error in ended if isinstance(error, BaseException)]:
                raise failed[0]


def machines_of(job: JobConfig) -> str:
    """Prefix of the names of this job's machines where the head has several jobs; empty: it brings up none."""
    return f"{name_prefix(job.name)}-" if job.provider.kind != "none" else ""


def check_apart(jobs: Collection[JobConfig]) -> None:
    """Raises:
    ConfigError: machines of several jobs could not be told apart by their names, or have none.
    """
    owners = [(machines_of(job), job) for job in jobs if job.provider.kind != "none"]
    problems: list[Problem] = []
    for prefix, job in owners:
        for other_prefix, other in owners:
            taken = [name for name in _names(prefix, job) if name.startswith(other_prefix)]
            if other is not job and taken and len(other_prefix) >= len(prefix):
                wrong = f"a machine of {job.name} would be called {taken[0]}, as if it were one of {other.name}"
                problems.append(Problem(f"job {job.name}", "name", wrong, "Name one of the jobs otherwise"))
        if wrong := next(filter(None, map(node_name_problem, _names(prefix, job))), ""):
            problems.append(Problem(f"job {job.name}", "name", f"its machine {wrong}", "Give the job a shorter name"))
    if problems:
        raise ConfigError(problems)


def _names(prefix: str, job: JobConfig) -> Iterator[str]:
    """Names to check: those of a trace's machines; otherwise only a number follows, so one name stands for all."""
    yield f"{prefix}1"
    if job.provider.kind == "local":
        yield from _named(planned(job.provider), prefix).kinds()


def _named(trace: Trace, prefix: str) -> Trace:
    return replace(trace, events=tuple(replace(event, node=f"{prefix}{event.node}") for event in trace.events))


def cluster_of(job: JobConfig, join: str, mark: str, logs: Path, keys: Path | None) -> ClusterProvider:
    """The cluster provider that ``job`` names. ``mark``: the label that identifies its machines as this run's."""
    if job.provider.kind == "kubernetes":
        return KubernetesProvider.of(job, join, mark)
    limits = job.limits
    leave_s = job.provider.notice_s + limits.stop_timeout_s
    return SlurmProvider(MachineJob(job, join, mark, logs, keys, leave_s, secrets.token_hex(4)), limits)
