"""Simulated engines and backends in processes that may be slow. What they lay out and load is held against each other.

trainer's, or service's ─ export_segment ─▶ PublishedWeights ◀─ load_weights ─ engine
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from actors.protocol.weights import Manifest
from actors.ranks.simulated import SimulatedRanks
from actors.rollout.engine import StepOutput, WeightTensors
from actors.rollout.engines.simulated_engine import SimulatedEngine
from actors.trainer.backend import LossSpec, MicroBatch, MicroBatchStats, StepResult
from actors.trainer.backends.simulated_backend import SimulatedBackend, TrainCost
from actors.weights.manifest import tensor_views
from supervisors.simulation.published import PublishedWeights
from transport.sim.process import SimProcess

R = TypeVar("R")

_LOOK_S: Final = 0.25
"""How soon a slow process notices that it is slow no more."""


async def slowly(life: SimProcess, work: Coroutine[Any, Any, R]) -> R:
    """Await ``work``; in a process that has been slowed down it takes that much longer, for as long as it is slow."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    result = await work
    slowness = life.slowness
    owed_s = (slowness - 1.0) * (loop.time() - began_s)
    while owed_s > 0.0 and life.slowness > 1.0:
        await asyncio.sleep(min(owed_s, _LOOK_S))
        owed_s -= _LOOK_S
    if owed_s > 0.0:  # the rest of it at full speed
        await asyncio.sleep(owed_s / slowness)
    return result


class PacedEngine(SimulatedEngine):
    """This is a simulated engine whose process may be slow. What it loads must be what was published."""

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
    """This is a simulated backend whose process may be slow. It keeps account of what it lays out."""

    def __init__(
        self, cost: TrainCost, life: SimProcess, published: PublishedWeights | None, ranks: SimulatedRanks | None = None
    ) -> None:
        """``published``: what is known of its job's weights; None: it is not known yet whose it is."""
        super().__init__(cost, ranks)
        self._life = life
        self._published = published

    def _known(self) -> PublishedWeights:
        assert self._published is not None, "whoever computes knows for whom"
        return self._published

    def _reached(self) -> None:
        """Say to which state it has come."""
        self._known().reached(*self.state())

    async def export_segment(self, path: Path, *, job: str, policy_version: int, chunk_bytes: int) -> Manifest:
        manifest = await super().export_segment(path, job=job, policy_version=policy_version, chunk_bytes=chunk_bytes)
        views = tensor_views(manifest, path.read_bytes())
        self._known().add(policy_version, {name: array.tobytes() for name, array in views.items()})
        return manifest

    async def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        return await slowly(self._life, super().accumulate(batch, loss))

    async def step(self, *, weight: float) -> StepResult:
        result = await slowly(self._life, super().step(weight=weight))
        self._reached()
        return result

    async def load(self, directory: Path) -> None:
        await super().load(directory)
        self._reached()

    async def save(self, directory: Path) -> None:
        await slowly(self._life, super().save(directory))
