"""A backend of the trainer's own process with a limit on each of its calls.

A backend that waits for others before it computes has the same limits where it computes, so that waiting takes nothing
from them: ``backends/service_backend.py``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from actors.protocol.weights import Manifest
from actors.trainer.backend import (
    BackendSpec,
    LossSpec,
    MicroBatch,
    MicroBatchStats,
    StepResult,
    StoredBytes,
    TrainBackend,
)
from configs.limits import Limits


class BoundedBackend:
    """Implements ``TrainBackend`` by another one; a call that takes longer than its limit raises TimeoutError."""

    def __init__(self, backend: TrainBackend, limits: Limits) -> None:
        self.kind = backend.kind
        self._backend = backend
        self._limits = limits

    async def start(self, spec: BackendSpec) -> None:
        async with asyncio.timeout(self._limits.ready_timeout_s):
            await self._backend.start(spec)

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

    async def step(self, *, weight: float) -> StepResult:
        async with asyncio.timeout(self._limits.train_step_timeout_s):
            return await self._backend.step(weight=weight)

    async def export_segment(self, path: Path, *, job: str, policy_version: int, chunk_bytes: int) -> Manifest:
        async with asyncio.timeout(self._limits.publish_timeout_s):
            return await self._backend.export_segment(
                path, job=job, policy_version=policy_version, chunk_bytes=chunk_bytes
            )

    async def save(self, directory: Path) -> None:
        async with asyncio.timeout(self._limits.checkpoint_timeout_s):
            await self._backend.save(directory)

    async def load(self, directory: Path) -> None:
        async with asyncio.timeout(self._limits.checkpoint_timeout_s):
            await self._backend.load(directory)

    async def export_checkpoint(self, directory: Path) -> None:
        async with asyncio.timeout(self._limits.checkpoint_timeout_s):
            await self._backend.export_checkpoint(directory)

    async def close(self) -> None:
        async with asyncio.timeout(self._limits.stop_timeout_s):
            await self._backend.close()
