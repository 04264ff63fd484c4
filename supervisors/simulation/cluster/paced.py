"""Simulated engines, backends and ranks in processes that may be slow. They report what they do to the checks.

trainer's, or service's ─ export_segment ─▶ PublishedWeights ◀─ load_weights ─ engine
leader ─ call ─▶ RankWatch ◀─ serve ─ follower
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from actors.protocol.weights import Manifest
from actors.ranks.group import GroupFollowers
from actors.ranks.simulated import SimulatedFollower, SimulatedRanks, decoded_order
from actors.roles import RoleArgs
from actors.rollout.engine import StepOutput, WeightTensors
from actors.rollout.engines.simulated_engine import SimulatedEngine
from actors.trainer.backend import AdamStep, Learned, LossSpec, MicroBatch, MicroBatchStats, StepResult
from actors.trainer.backends.simulated_backend import SimulatedBackend, TrainCost, write_share
from actors.weights.manifest import tensor_views
from actors.weights.shares import share_name
from supervisors.simulation.records.published import PublishedWeights
from supervisors.simulation.records.rank_watch import RankWatch
from transport.sim.process import SimProcess

R = TypeVar("R")

_LOOK_S: Final = 0.25
"""Seconds within which a slow process notices that it is no longer slow."""


async def slowly(life: SimProcess, work: Coroutine[Any, Any, R]) -> R:
    """Await ``work``; a slow process then sleeps to make it ``slowness`` times as long, while it stays slow."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    result = await work
    slowness = life.slowness
    left_s = (slowness - 1.0) * (loop.time() - began_s)
    while left_s > 0.0 and life.slowness > 1.0:
        await asyncio.sleep(min(left_s, _LOOK_S))
        left_s -= _LOOK_S
    if left_s > 0.0:  # the rest of it at full speed
        await asyncio.sleep(left_s / slowness)
    return result


class PacedEngine(SimulatedEngine):
    """Generates in a process that may be slow, and checks that the weights it loads were published."""

    def __init__(self, life: SimProcess, published: PublishedWeights, ranks: SimulatedRanks | None = None) -> None:
        super().__init__(ranks)
        self._life = life
        self._published = published

    async def load_weights(
        self,
        tensors: WeightTensors,
        dtypes: Mapping[str, str],
        policy_version: int,
        *,
        in_flight: Literal["keep", "recompute"],
    ) -> None:
        self._published.check(policy_version, {name: array.tobytes() for name, array in tensors.items()})
        await super().load_weights(tensors, dtypes, policy_version, in_flight=in_flight)

    async def step(self) -> StepOutput:
        return await slowly(self._life, super().step())


class PacedBackend(SimulatedBackend):
    """Trains in a process that may be slow, and records the weights that it publishes."""

    def __init__(
        self,
        cost: TrainCost,
        life: SimProcess,
        published: PublishedWeights | None,
        ranks: SimulatedRanks | None = None,
        sources: Sequence[str] = (),
    ) -> None:
        """``published``: record of its job's weights; None: the job is not known yet."""
        super().__init__(cost, ranks, sources)
        self._life = life
        self._published = published

    def _find_memory(self, batch: MicroBatch) -> None:
        super()._find_memory(batch)
        if self._life.memory_strikes and len(batch.lengths) > self._ranks.count:
            self._life.memory_strikes -= 1
            self._run_short(batch)

    def _known(self) -> PublishedWeights:
        assert self._published is not None, "whoever computes knows for whom"
        return self._published

    def _reached(self) -> None:
        """Record the state that the backend has reached."""
        self._known().reached(*self.state())

    async def export_segment(self, path: Path, *, job: str, policy_version: int, chunk_bytes: int) -> Manifest:
        manifest = await super().export_segment(path, job=job, policy_version=policy_version, chunk_bytes=chunk_bytes)
        views = tensor_views(manifest, self._policy.weights.tobytes())
        self._known().add(policy_version, {name: array.tobytes() for name, array in views.items()})
        return manifest

    async def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        return await slowly(self._life, super().accumulate(batch, loss))

    async def learn(self, batch: MicroBatch, loss: LossSpec, *, backward: bool = True) -> Learned:
        return await slowly(self._life, super().learn(batch, loss, backward=backward))

    async def step(self, *, weight: float, adam: AdamStep | None = None) -> StepResult:
        result = await slowly(self._life, super().step(weight=weight, adam=adam))
        self._reached()
        return result

    async def load(self, directory: Path, *, optimizer: bool = True) -> None:
        await super().load(directory, optimizer=optimizer)
        self._reached()

    async def save(self, directory: Path) -> None:
        await slowly(self._life, super().save(directory))


def sources_of(args: RoleArgs) -> tuple[str, ...]:
    """Sources of what the job's trainer publishes: the machines of its first copy, as a manifest names them."""
    trainer = args.job_config.trainer
    each = trainer.ranks // trainer.nodes
    return "", *(share_name(rank) for rank in range(each, trainer.ranks // trainer.replicas, each))


class WatchedFollowers(GroupFollowers):
    """Calls the followers of one life of a leader, and reports the calls to the watch."""

    def __init__(self, args: RoleArgs, life: str, watch: RankWatch) -> None:
        super().__init__(args)
        self._life, self._watch = life, watch

    async def call(
        self, orders: Sequence[bytes], *, timeout_s: float, ends: Callable[[bytes], bool] | None = None
    ) -> list[bytes]:
        self._watch.ordered(self._life, orders)
        answers = await super().call(orders, timeout_s=timeout_s, ends=ends)
        self._watch.ended(self._life, self.count)
        return answers


class WatchedFollower(SimulatedFollower):
    """Serves as a simulated follower in a process that may be slow, and reports the orders to the watch.

    The first rank of a machine keeps that machine's share of the weights.
    """

    def __init__(self, args: RoleArgs, name: str, life: SimProcess, watch: RankWatch) -> None:
        super().__init__(args.rank, args.size)
        self._sources = sources_of(args)
        self._source = share_name(args.rank)
        self._name, self._life, self._watch = name, life, watch

    async def serve(self, order: bytes) -> bytes:
        self._watch.served(self._name, self._rank, order)
        share = decoded_order(order).share
        if share is not None and self._source in self._sources:
            machine = self._sources.index(self._source)
            write_share(Path(share[0]), self._source, share[1], machine, len(self._sources))
        return await slowly(self._life, super().serve(order))
