"""A training backend with a time limit on each of its calls.

A backend on a shared service waits for its turn first, so the service applies the limits instead, to the computing
alone: ``backends/service_backend.py``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from actors.core.context import Context
from actors.core.watch import Down
from actors.protocol.weights import Manifest
from actors.trainer.backend import (
    AdamStep,
    BackendSpec,
    Learned,
    LossSpec,
    MemoryUse,
    MicroBatch,
    MicroBatchStats,
    StepResult,
    StoredBytes,
    TrainBackend,
)
from configs.limits import Limits


def bounded(backend: TrainBackend, limits: Limits) -> TrainBackend:
    """``backend`` with time limits; a shared one is returned as it is, since its service applies them."""
    return backend if backend.is_shared else BoundedBackend(backend, limits)


class BoundedBackend:
    """A bounded backend passes each call on to another; one that takes longer than its limit raises TimeoutError."""

    def __init__(self, backend: TrainBackend, limits: Limits) -> None:
        self.kind, self.is_shared = backend.kind, backend.is_shared
        self._backend = backend
        self._limits = limits

    def connect(self, ctx: Context) -> None:
        self._backend.connect(ctx)

    async def start(self, spec: BackendSpec, *, checkpoint_step: int = 0) -> int | None:
        async with asyncio.timeout(self._limits.ready_timeout_s):
            return await self._backend.start(spec, checkpoint_step=checkpoint_step)

    def heard(self, message: Down) -> None:
        self._backend.heard(message)

    def committed(self, steps: int) -> None:
        self._backend.committed(steps)

    def taken_metrics(self) -> dict[str, float]:
        return self._backend.taken_metrics()

    def stored_bytes(self) -> StoredBytes:
        return self._backend.stored_bytes()

    async def score(self, batch: MicroBatch, *, temperature: float, reference: bool) -> np.ndarray:
        async with asyncio.timeout(self._limits.train_step_timeout_s):
            return await self._backend.score(batch, temperature=temperature, reference=reference)

    async def values(self, batch: MicroBatch) -> np.ndarray:
        async with asyncio.timeout(self._limits.train_step_timeout_s):
            return await self._backend.values(batch)

    async def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        async with asyncio.timeout(self._limits.train_step_timeout_s):
            return await self._backend.accumulate(batch, loss)

    async def learn(self, batch: MicroBatch, loss: LossSpec, *, backward: bool = True) -> Learned:
        async with asyncio.timeout(self._limits.train_step_timeout_s):
            return await self._backend.learn(batch, loss, backward=backward)

    async def drop_sums(self) -> None:
        async with asyncio.timeout(self._limits.train_step_timeout_s):
            await self._backend.drop_sums()

    async def use_recompute(self, way: str) -> None:
        async with asyncio.timeout(self._limits.train_step_timeout_s):
            await self._backend.use_recompute(way)

    async def measure(self, batch: MicroBatch, loss: LossSpec) -> MemoryUse | None:
        async with asyncio.timeout(self._limits.train_step_timeout_s):
            return await self._backend.measure(batch, loss)

    async def step(self, *, weight: float, adam: AdamStep | None = None) -> StepResult:
        async with asyncio.timeout(self._limits.train_step_timeout_s):
            return await self._backend.step(weight=weight, adam=adam)

    async def export_segment(self, path: Path, *, job: str, policy_version: int, chunk_bytes: int) -> Manifest:
        async with asyncio.timeout(self._limits.publish_timeout_s):
            return await self._backend.export_segment(
                path, job=job, policy_version=policy_version, chunk_bytes=chunk_bytes
            )

    async def save(self, directory: Path) -> None:
        async with asyncio.timeout(self._limits.checkpoint_timeout_s):
            await self._backend.save(directory)

    async def load(self, directory: Path, *, optimizer: bool = True) -> None:
        async with asyncio.timeout(self._limits.checkpoint_timeout_s):
            await self._backend.load(directory, optimizer=optimizer)

    async def export_checkpoint(self, directory: Path) -> None:
        async with asyncio.timeout(self._limits.checkpoint_timeout_s):
            await self._backend.export_checkpoint(directory)

    async def close(self, *, keep: bool = True) -> None:
        async with asyncio.timeout(self._limits.stop_timeout_s):
            await self._backend.close(keep=keep)
