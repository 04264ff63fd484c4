"""Jobs whose training is a function of their names, played against any backend, and against a service that dies.

A job's steps are fixed: what it trains with follows from its name, as a replay does from the journal. In a shared
service it is played by one life of a trainer after another, from what the service has kept or the newest checkpoint.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np

from actors.trainer.backend import BackendSpec, CriticSpec, LossSpec, MicroBatch, TrainBackend
from actors.trainer.errors import BundleLost
from tests.actors.train_service.service_world import ServiceWorld, Trainer, spec_of

Pause = Callable[[], Awaitable[None]]
"""Awaited between calls, as a trainer waits for its samples."""
LOSS = LossSpec(value_clip=0.5)
STEPS = 4
JUDGED = "judged"
"""A job of this name has a critic, which is alone in the first step."""


def batches(job: str, step: int) -> list[MicroBatch]:
    """What ``job`` trains with in ``step``: two or three micro-batches of its own."""
    rng = np.random.default_rng([*job.encode(), step])
    made = [_batch(rng) for _ in range(int(rng.integers(2, 4)))]
    return [_judged(batch, rng) for batch in made] if job == JUDGED else made


def _judged(batch: MicroBatch, rng: np.random.Generator) -> MicroBatch:
    old, returns = (rng.normal(size=batch.input_ids.shape).astype(np.float32) for _ in range(2))
    return dataclasses.replace(batch, old_values=old, returns=returns)


def _spec(job: str, model: Path, **changes: object) -> BackendSpec:
    critic = CriticSpec(model_path=model, learning_rate=0.02, warmup_steps=1) if job == JUDGED else None
    return spec_of(model, critic=critic, **changes)


def _batch(rng: np.random.Generator) -> MicroBatch:
    rows, width = 3, int(rng.integers(6, 10))
    lengths = rng.integers(4, width + 1, rows).astype(np.int32)
    t = np.arange(width)
    where = (t >= 2) & (t < lengths[:, None])
    return MicroBatch(
        input_ids=rng.integers(3, 99, (rows, width)).astype(np.int32),
        lengths=lengths,
        prompt_lengths=np.full(rows, 2, np.int32),
        behaviour_logprobs=np.where(where, rng.normal(-4.6, 0.1, (rows, width)), 0).astype(np.float32),
        advantages=np.broadcast_to(rng.normal(size=(rows, 1)), (rows, width)).astype(np.float32),
        loss_weight=where.astype(np.float32),
    )


@dataclasses.dataclass
class Record:
    """What a job has come to, and how it got there."""

    directory: Path
    losses: dict[int, list[float]] = dataclasses.field(default_factory=dict)
    norms: dict[int, float] = dataclasses.field(default_factory=dict)
    versions: dict[int, str] = dataclasses.field(default_factory=dict)
    checkpoint: int = 0
    """Steps in the newest checkpoint."""
    committed: int = 0
    lives: int = 0
    resumed: list[int] = dataclasses.field(default_factory=list)
    """Steps in the states that the service had kept, and a later life went on from."""

    @property
    def result(self) -> tuple[object, ...]:
        """Losses, gradient norms, weights of each version, and the bytes of weights, moments and counts at the end."""
        return self.losses, self.norms, self.versions, _digest(self.directory / "final")


def _digest(directory: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(directory.iterdir()))).hexdigest()


async def train(backend: TrainBackend, job: str, record: Record, first: int, pause: Pause) -> None:
    """The steps from ``first`` on; a checkpoint in the middle, and the state at the end."""
    for step in range(first, STEPS):
        losses: list[float] = []
        for batch in batches(job, step):
            await pause()
            await backend.accumulate(batch, LOSS)
            values = float((await backend.values(batch)).sum()) if job == JUDGED else 0.0
            losses.append(values)
        result = await backend.step(weight=10.0)
        losses += [result.stats.loss_sum, result.stats.value_loss_sum]
        path = record.directory / f"v{step + 1}"
        manifest = await backend.export_segment(path, job=job, policy_version=step + 1, chunk_bytes=1 << 20)
        path.unlink()
        await pause()
        record.losses[step], record.norms[step] = losses, result.grad_norm
        record.versions[step + 1] = b"".join(manifest.chunk_hashes).hex()
        record.committed = max(record.committed, step + 1)
        backend.committed(step + 1)
        if step + 1 == STEPS // 2 > record.checkpoint:
            await backend.save(record.directory / "checkpoint")
            record.checkpoint = step + 1
    await backend.save(record.directory / "final")


async def alone(make: Callable[[], TrainBackend], job: str, directory: Path, model: Path = Path("m")) -> Record:
    """The job with a backend of its own."""

    async def at_once() -> None: ...

    directory.mkdir(parents=True)
    backend, record = make(), Record(directory)
    await backend.start(_spec(job, model, device="cpu", threads=1))
    await train(backend, job, record, 0, at_once)
    await backend.close()
    return record


class SharedJob:
    """A job that is served, in as many lives of its trainer as it takes. ``kill`` ends the present one."""

    def __init__(self, world: ServiceWorld, job: str, directory: Path, pause: Pause, model: Path = Path("m")) -> None:
        directory.mkdir(parents=True)
        self.record = Record(directory)
        self._world, self._job, self._pause, self._model = world, job, pause, model
        self._trainer: Trainer | None = None
        self._life: asyncio.Task[None] | None = None

    async def play(self) -> Record:
        """Until the job is done."""
        while True:
            await self._world.is_there.wait()
            self.record.lives += 1
            self._trainer = await self._world.trainer(self._job, checkpoint_step=self.record.checkpoint)
            self._life = asyncio.create_task(self._one_life(self._trainer))
            try:
                await self._life
            except BundleLost:
                continue
            except asyncio.CancelledError:
                if not self._life.cancelled():
                    raise
                continue
            return self.record

    async def kill(self) -> None:
        if self._life is not None and self._trainer is not None and not self._life.done():
            self._life.cancel()
            await self._trainer.kill()

    async def _one_life(self, trainer: Trainer) -> None:
        record, backend = self.record, trainer.backend
        await trainer.attach(_spec(self._job, self._model))
        first = record.checkpoint
        if trainer.resumed_step is not None:
            assert record.checkpoint < trainer.resumed_step <= record.committed, "state that nobody may go on from"
            first = trainer.resumed_step
            record.resumed.append(first)
        elif first:
            await backend.load(record.directory / "checkpoint")
        await train(backend, self._job, record, first, self._pause)
        await backend.close(keep=False)
