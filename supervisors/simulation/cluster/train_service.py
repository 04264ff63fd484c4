"""The training service of a simulation: the real actor over simulated backends, on the simulated machine's tiers.

real TrainService, SliceQueue, Residency, ParkedFiles ─▶ ServedBackend ─▶ ServiceWatch
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
    AccumulateCall,
    ExportCheckpoint,
    ExportSegment,
    LearnCall,
    LoadCall,
    SaveCall,
    ScoreCall,
    StepCall,
    TrainAnswer,
    TrainCall,
    ValuesCall,
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
from actors.trainer.backend import AdamStep, BackendSpec, Learned, LossSpec, MicroBatch, MicroBatchStats, StepResult
from actors.trainer.backends.simulated_backend import TrainCost
from actors.trainer.parking import StoredPart
from supervisors.checkers.service_calls import START
from supervisors.sharing.services import DIRECTORY
from supervisors.simulation.cluster.context import SimulationContext
from supervisors.simulation.cluster.paced import PacedBackend
from supervisors.simulation.records.service_watch import ServiceWatch, what_of
from transport.sim.process import SimProcess

_TORN: Final = 0.3
"""Probability that a file was not yet on the disk when the power went."""


class ServedBackend(PacedBackend):
    """Computes in a training service, and reports each call, with the job and the life that asked for it."""

    def __init__(self, cost: TrainCost, life: SimProcess, world: SimulationContext) -> None:
        super().__init__(cost, life, None)
        self._world = world
        self._job = self._bundle_life = ""
        self.asked_s = 0.0
        """Time at which the present call began to wait."""

    def serve(self, job: str, life: str) -> None:
        """Set, before the start, for which life of which job the backend computes."""
        self._job, self._bundle_life = job, life
        self._published = self._world.published(job)

    def _computing(self, what: str) -> AbstractContextManager[None]:
        return self._world.services.computing(self._life, self._job, self._bundle_life, what, self.asked_s)

    async def start(self, spec: BackendSpec, *, checkpoint_step: int = 0) -> None:
        with self._computing(START):
            await super().start(spec, checkpoint_step=checkpoint_step)

    async def score(self, batch: MicroBatch, *, temperature: float, reference: bool) -> np.ndarray:
        with self._computing(what_of(ScoreCall(batch, temperature, reference))):
            return await super().score(batch, temperature=temperature, reference=reference)

    async def values(self, batch: MicroBatch) -> np.ndarray:
        with self._computing(what_of(ValuesCall(batch))):
            return await super().values(batch)

    async def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        with self._computing(what_of(AccumulateCall(batch, loss))):
            return await super().accumulate(batch, loss)

    async def learn(self, batch: MicroBatch, loss: LossSpec, *, backward: bool = True) -> Learned:
        with self._computing(what_of(LearnCall(batch, loss, backward))):
            return await super().learn(batch, loss, backward=backward)

    async def step(self, *, weight: float, adam: AdamStep | None = None) -> StepResult:
        with self._computing(what_of(StepCall(weight, adam))):
            return await super().step(weight=weight, adam=adam)

    async def export_segment(self, path: Path, *, job: str, policy_version: int, chunk_bytes: int) -> Manifest:
        with self._computing(what_of(ExportSegment(str(path), policy_version, chunk_bytes, job))):
            return await super().export_segment(path, job=job, policy_version=policy_version, chunk_bytes=chunk_bytes)

    async def save(self, directory: Path) -> None:
        with self._computing(what_of(SaveCall(str(directory)))):
            await super().save(directory)

    async def load(self, directory: Path, *, optimizer: bool = True) -> None:
        with self._computing(what_of(LoadCall(str(directory), optimizer))):
            await super().load(directory, optimizer=optimizer)

    async def export_checkpoint(self, directory: Path) -> None:
        with self._computing(what_of(ExportCheckpoint(str(directory)))):
            await super().export_checkpoint(directory)

    async def restore(self, stored: Mapping[str, StoredPart]) -> None:
        """Resume a state, which some trainer of the job must have reached."""
        await super().restore(stored)
        self._reached()


class WatchedService(TrainService):
    """Runs the real training service, and tells its backends for which job they compute."""

    def __init__(self, args: ServiceArgs, world: SimulationContext, life: SimProcess, cost: TrainCost) -> None:
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
    """Keeps files in a simulated machine's memory and on its disk, under numbers as names."""

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
    """Zero the ends of some files that services have stored, as a power loss may; returns how many."""
    torn = 0
    for path in sorted(root.glob(f"{DIRECTORY}/*/parked/*")):
        if rng.random() < _TORN:
            data = path.read_bytes()
            kept = data[: rng.randrange(len(data) + 1)]
            path.write_bytes(kept.ljust(len(data), b"\0"))
            torn += 1
    return torn
