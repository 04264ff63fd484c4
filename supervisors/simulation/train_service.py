"""The training service of a simulation: the real actor over simulated backends, on the simulated machine's tiers.

TrainService, Turns, Residency, ParkedFiles as they are ─▶ ServedBackend ─▶ ServiceWatch
"""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import numpy as np

from actors.protocol.training import (
    Accumulate,
    ExportCheckpoint,
    ExportSegment,
    Load,
    Save,
    Score,
    Step,
    TrainAnswer,
    TrainCall,
    Values,
)
from actors.protocol.weights import Manifest
from actors.roles import ServiceArgs
from actors.train_service.admission import Agreed
from actors.train_service.bundles import Bundle
from actors.train_service.parked_files import ParkedFiles, PartFile, StoredCopy
from actors.train_service.parked_files import Tier as StoredTier
from actors.train_service.parked_manifest import ParkedManifest
from actors.train_service.service import TrainService
from actors.train_service.tiers import ParkedState
from actors.trainer.backend import BackendSpec, LossSpec, MicroBatch, MicroBatchStats, StepResult
from actors.trainer.backends.simulated_backend import TrainCost
from actors.trainer.parking import StoredPart
from supervisors.checkers.service_calls import START
from supervisors.head.services import DIRECTORY
from supervisors.simulation.ground import Ground
from supervisors.simulation.paced import PacedBackend
from supervisors.simulation.service_watch import ServiceWatch, what_of
from transport.sim.process import SimProcess

_TORN: Final = 0.3
"""The chance that a file was not written yet."""


class ServedBackend(PacedBackend):
    """This is a paced backend in a training service. It says what it computes, and for which life of which job."""

    def __init__(self, cost: TrainCost, life: SimProcess, world: Ground) -> None:
        super().__init__(cost, life, None)
        self._world = world
        self._job = self._bundle_life = ""
        self.asked_s = 0.0
        """Time from which the present call has waited."""

    def serve(self, job: str, life: str) -> None:
        """Say whose it is, before it starts."""
        self._job, self._bundle_life = job, life
        self._published = self._world.published(job)

    def _computing(self, what: str) -> AbstractContextManager[None]:
        return self._world.services.computing(self._life, self._job, self._bundle_life, what, self.asked_s)

    async def start(self, spec: BackendSpec) -> None:
        with self._computing(START):
            await super().start(spec)

    async def score(self, batch: MicroBatch, *, temperature: float, reference: bool) -> np.ndarray:
        with self._computing(what_of(Score(batch, temperature, reference))):
            return await super().score(batch, temperature=temperature, reference=reference)

    async def values(self, batch: MicroBatch) -> np.ndarray:
        with self._computing(what_of(Values(batch))):
            return await super().values(batch)

    async def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        with self._computing(what_of(Accumulate(batch, loss))):
            return await super().accumulate(batch, loss)

    async def step(self, *, weight: float) -> StepResult:
        with self._computing(what_of(Step(weight))):
            return await super().step(weight=weight)

    async def export_segment(self, path: Path, *, job: str, policy_version: int, chunk_bytes: int) -> Manifest:
        with self._computing(what_of(ExportSegment(str(path), policy_version, chunk_bytes, job))):
            return await super().export_segment(path, job=job, policy_version=policy_version, chunk_bytes=chunk_bytes)

    async def save(self, directory: Path) -> None:
        with self._computing(what_of(Save(str(directory)))):
            await super().save(directory)

    async def load(self, directory: Path) -> None:
        with self._computing(what_of(Load(str(directory)))):
            await super().load(directory)

    async def export_checkpoint(self, directory: Path) -> None:
        with self._computing(what_of(ExportCheckpoint(str(directory)))):
            await super().export_checkpoint(directory)

    async def restore(self, stored: Mapping[str, StoredPart]) -> None:
        """Resumed state is state that some trainer of the job has come to."""
        await super().restore(stored)
        self._reached()


class WatchedService(TrainService):
    """This is the training service of a simulation: the real one, which says whom its backends are of."""

    def __init__(self, args: ServiceArgs, world: Ground, life: SimProcess, cost: TrainCost) -> None:
        super().__init__(
            args,
            lambda kind: ServedBackend(cost, life, world),
            lambda directory: SimulatedFiles(directory, world.services),
        )
        self._watch = world.services
        self._watch.begins(life, args)

    async def _start(self, bundle: Bundle, agreed: Agreed) -> None:
        _served(bundle).asked_s = self.ctx.now()
        await super()._start(bundle, agreed)

    async def _start_from(self, bundle: Bundle, agreed: Agreed, parked: ParkedState | None) -> None:
        _served(bundle).serve(bundle.job, bundle.life)
        await super()._start_from(bundle, agreed, parked)

    async def _answer(self, bundle: Bundle, message: TrainCall, answer: asyncio.Future[TrainAnswer]) -> None:
        _served(bundle).asked_s = self.ctx.now()
        await super()._answer(bundle, message, answer)

    def _end_life(self, bundle: Bundle, why: str, *, keep: bool = True) -> None:
        self._watch.record.over_s.setdefault(bundle.life, self.ctx.now())
        super()._end_life(bundle, why, keep=keep)


def _served(bundle: Bundle) -> ServedBackend:
    assert isinstance(bundle.backend, ServedBackend), "the services of a simulation have no others"
    return bundle.backend


class SimulatedFiles(ParkedFiles):
    """These are files in a simulated machine's memory and on its disk. Their names are numbers."""

    def __init__(self, directory: Path, watch: ServiceWatch) -> None:
        super().__init__(directory)
        self._watch = watch

    def fresh_name(self) -> str:
        return self._watch.fresh_name()

    def make(self, tier: StoredTier, job: str, size_bytes: int) -> PartFile:
        self._require_room(tier)
        return super().make(tier, job, size_bytes)

    def commit(self, manifest: ParkedManifest, tier: StoredTier, files: dict[str, PartFile]) -> StoredCopy:
        self._require_room(tier)
        return super().commit(manifest, tier, files)

    def _require_room(self, tier: StoredTier) -> None:
        if tier in self._watch.full_tiers:
            raise OSError(errno.ENOSPC, f"the simulated {tier} tier is full")


def tear_stored(root: Path, rng: random.Random) -> int:
    """The power ends, and not all that services have stored on the disk was written: how many files end in zeros."""
    torn = 0
    for path in sorted(root.glob(f"{DIRECTORY}/*/parked/*")):
        if rng.random() < _TORN:
            data = path.read_bytes()
            kept = data[: rng.randrange(len(data) + 1)]
            path.write_bytes(kept.ljust(len(data), b"\0"))
            torn += 1
    return torn
