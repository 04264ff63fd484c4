"""The provider of one run, as its job file asks for it: from when the job's processes are up until the run is over.

It lives in the machine process (``machine_process.py``), beside the head, so that machines survive the head's death.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from actors.control.socket import for_others
from configs.schema import JobConfig
from supervisors.providers.function_machines import FunctionMachines
from supervisors.providers.keeper import Keeper
from supervisors.providers.kubernetes.provider import KubernetesProvider
from supervisors.providers.local import LocalProvider
from supervisors.providers.ownership import Ownership
from supervisors.providers.provider import ClusterProvider, Provider
from supervisors.providers.replay import Replay, planned
from supervisors.providers.slurm import SlurmProvider
from supervisors.providers.slurm_script import MachineJob
from supervisors.providers.traces import SPOT, TraceEvent

Say = Callable[[Mapping[str, Any]], None]


class JobProvider:
    """It serves one run: let it ``hear`` the job's progress, and keep it open with ``providing`` while that lasts."""

    def __init__(self, job: JobConfig, run_dir: Path, say: Say, *, keys: Path | None) -> None:
        self._job = job
        self._run_dir = run_dir
        self._logs = run_dir / "logs"
        self._say = say
        self._keys = keys
        self._running = asyncio.Event()
        self._aimed: Replay | Keeper | None = None
        self._functions: FunctionMachines | None = None

    def hear(self, progress: Mapping[str, Any]) -> None:
        """The trace's time begins when the job's own processes are up, not while its model is made."""
        if progress.get("processes") == "ready":
            self._running.set()
        if (workers := progress.get("remote_workers")) is not None:
            self._aim(workers, str(progress.get("remote_nodes", "")).split(","))
        if (joined := progress.get("joined_nodes")) is not None and isinstance(self._aimed, Keeper):
            self._aimed.joined(str(joined).split(","))
        if self._functions is not None and (book := progress.get("functions")) is not None:
            self._functions.follow(str(book))
        self._say(progress)

    @contextlib.asynccontextmanager
    async def providing(self, join: str) -> AsyncIterator[None]:
        """Machines come and go meanwhile; they join the head at ``join``.

        Raises:
            ConfigError: the trace cannot be read or does not fit.
            ProviderError: the cluster would not give such machines.
        """
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
        limits, trace = self._job.limits, planned(spot)
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
            self._aimed = None  # a head that still runs may go on to say what it wants
            await provider.close()

    @contextlib.asynccontextmanager
    async def _kept_at(self, join: str) -> AsyncIterator[None]:
        """So many machines of a cluster are kept; the first are asked for when there is something to join."""
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
        """Machines at first: never more than the job can use, since what is given back does not come again."""
        most = self._job.scheduling.workers_max
        return self._job.provider.nodes_max if most is None else self._nodes(max(0, most - self._job.rollout.workers))

    def _aim(self, workers: int, nodes: Collection[str]) -> None:
        """The job wants this many workers on machines of ours, and has some on ``nodes``."""
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


def cluster_of(job: JobConfig, join: str, mark: str, logs: Path, keys: Path | None) -> ClusterProvider:
    """The provider of other hosts that ``job`` names. ``mark``: by which its machines are known as this run's."""
    if job.provider.kind == "kubernetes":
        return KubernetesProvider.of(job, join, mark)
    limits = job.limits
    leave_s = job.provider.notice_s + limits.stop_timeout_s
    return SlurmProvider(MachineJob(job, join, mark, logs, keys, leave_s, secrets.token_hex(4)), limits)
