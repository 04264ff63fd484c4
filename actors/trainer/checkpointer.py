"""The trainer's checkpoints: one is loaded at its start, others are written while training goes on.

    write   backend.save ─ backend.export_checkpoint ─▶ hidden directory      between two optimizer steps
    store   flush, rename, prune ─▶ CheckpointTaken ─▶ scheduler              beside the next step

Invariants
- At most one checkpoint is being stored; the next ``write`` waits for it.
- Room for a checkpoint is checked before it is written; a failed one leaves nothing behind.
- The scheduler is told of a checkpoint once it is durable. Its layout on disk: ``checkpoint.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

from actors.core.context import Context
from actors.host.room import require_room
from actors.protocol.failures import Acknowledged
from actors.protocol.steps import CheckpointTaken
from actors.trainer import checkpoint
from actors.trainer.backend import TrainBackend
from actors.trainer.errors import CheckpointCorrupt
from actors.trainer.room import telling_of_room
from actors.trainer.spans import SpanRecorder
from configs.schema import JobConfig

EXPORT_NOTE: Final = "export_failed.txt"
"""File that says why a checkpoint holds no model for other programs."""
_REFUSALS: Final = (ValueError, TypeError, KeyError, AttributeError, NotImplementedError, ImportError)
"""Errors by which a library refuses to export; a disk's errors are none of them."""


class ResumePoint(NamedTuple):
    """Names the checkpoint from which training goes on, and its step; no checkpoint means step 0."""

    path: Path | None
    step: int


class Checkpointer:
    """Loads and writes the checkpoints of one job.

    ``ask`` asks the scheduler until it answers; ``on_trouble`` tells people of a problem: its kind and a text.
    """

    def __init__(
        self,
        ctx: Context,
        backend: TrainBackend,
        spans: SpanRecorder,
        job: JobConfig,
        run_dir: Path,
        ask: Callable[[CheckpointTaken, type[Acknowledged]], Awaitable[Acknowledged]],
        on_trouble: Callable[[str, str], None],
    ) -> None:
        self._ctx = ctx
        self._backend = backend
        self._spans = spans
        self._job = job
        self._run_dir = run_dir
        self._ask = ask
        self._on_trouble = on_trouble
        self._storing: asyncio.Task[object] | None = None

    async def find(self, named: str) -> ResumePoint:
        """The ``named`` checkpoint, else the newest one, with all of its files verified; else none and step 0."""
        path = Path(named) if named else checkpoint.newest(self._run_dir)
        if path is None:
            return ResumePoint(None, 0)
        state = await self._ctx.run_blocking(checkpoint.read, path)
        if state.job != self._job.name:
            raise CheckpointCorrupt(
                f"{path}: a checkpoint of job {state.job!r}, expected {self._job.name!r}; resume from one of its own"
            )
        return ResumePoint(path, state.step)

    async def load(self, found: ResumePoint) -> None:
        """Have the backend load the checkpoint that was found, if any."""
        if found.path is not None:
            await self._backend.load(found.path / checkpoint.TRAINER_DIRECTORY)
            self._ctx.log.info("checkpoint loaded", path=str(found.path), step=found.step)

    async def write(self, step: int, *, final: bool, spared: tuple[int, ...] | None = None) -> None:
        """Write the present weights, which are those of ``step``; the next step is trained while they are stored.

        ``spared``: steps whose checkpoints pruning keeps; None: unknown, so with ``keep_best`` it removes none.
        """
        await self.settle()
        with self._spans.span("checkpoint", step=step, version=step):
            partial = await self._ctx.run_blocking(checkpoint.begin, self._run_dir, step)
            async with self._writing(partial, step) as needed_bytes:
                await self._ctx.run_blocking(require_room, partial, needed_bytes, f"the checkpoint of step {step}")
                await self._backend.save(partial / checkpoint.TRAINER_DIRECTORY)
                await self._export(partial, step)
        self._storing = self._ctx.start_task(self._store(partial, step, final, spared), f"store checkpoint {step}")

    async def _export(self, partial: Path, step: int) -> None:
        """Write the model for other programs. If its library refuses, the checkpoint lacks it: training needs none."""
        try:
            await self._backend.export_checkpoint(partial)
        except _REFUSALS as error:
            why = f"the model could not be exported: {type(error).__name__}: {error}"
            self._ctx.log.error("a checkpoint without an exported model", path=str(partial), why=why)
            self._on_trouble(
                "model_not_exported",
                f"the checkpoint of step {step} holds no model for other programs; training goes on from it: {why}",
            )
            note = f"{why}\nTraining goes on from this checkpoint; no other program can load it.\n"
            await self._ctx.run_blocking((partial / EXPORT_NOTE).write_text, note)

    @asynccontextmanager
    async def _writing(self, partial: Path, step: int) -> AsyncIterator[int]:
        """Remove ``partial`` if the block, which writes it, fails. Yields the bytes that it will take."""
        size = self._backend.stored_bytes().checkpoint
        try:
            with telling_of_room(partial, f"the checkpoint of step {step}", size):
                yield size
        except Exception:
            await self._ctx.run_blocking(checkpoint.abandon, partial)
            raise

    async def _store(self, partial: Path, step: int, final: bool, spared: tuple[int, ...] | None) -> None:
        state = checkpoint.CheckpointState(job=self._job.name, step=step)
        async with self._writing(partial, step):
            path = await self._ctx.run_blocking(checkpoint.commit, partial, state)
        if spared is not None or not self._job.checkpoint.keep_best:
            await self._ctx.run_blocking(checkpoint.prune, self._run_dir, self._job.checkpoint.keep, spared or ())
        await self._ask(CheckpointTaken(job=self._job.name, step=step, path=str(path), final=final), Acknowledged)

    async def settle(self) -> None:
        """Wait until the last checkpoint is stored."""
        if self._storing is not None:
            async with asyncio.timeout(2 * self._ctx.limits.checkpoint_timeout_s):
                await self._storing
            self._storing = None
