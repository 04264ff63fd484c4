"""The trainer's checkpoints: one is loaded when it starts, others are written while it goes on training.

    write   backend.save ─ backend.export_checkpoint ─▶ hidden directory      between two optimizer steps
    store   flush, rename, prune ─▶ CheckpointTaken ─▶ scheduler              beside the next step

Invariants
- At most one is being stored; the next ``write`` waits for it.
- Room for a checkpoint is looked at before it is written; of one that could not be, nothing is left.
- The scheduler is told of a checkpoint once it is durable. How it lies on the disk: ``checkpoint.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

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
"""File of a checkpoint that says why it holds no model for other programs."""
_REFUSALS: Final = (ValueError, TypeError, KeyError, AttributeError, NotImplementedError, ImportError)
"""Errors by which a library says that it does not want to; a disk's errors are none of them."""


class Checkpointer:
    """Loads and writes the checkpoints of one job.

    ``ask`` puts a question to the scheduler until it is answered; ``on_trouble`` has people told a text of a kind.
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

    async def resume(self, named: str) -> int:
        """Load the checkpoint that was named, else the newest one, else stay with the model as it is.

        Returns:
            The step with which training goes on.
        """
        path = self._chosen(named)
        if path is None:
            return 0
        state = await self._read(path)
        await self._backend.load(path / checkpoint.TRAINER_DIRECTORY)
        self._ctx.log.info("checkpoint loaded", path=str(path), step=state.step)
        return state.step

    async def step_of(self, named: str) -> int:
        """The step with which training would go on after ``resume``."""
        path = self._chosen(named)
        return 0 if path is None else (await self._read(path)).step

    def _chosen(self, named: str) -> Path | None:
        return Path(named) if named else checkpoint.newest(self._run_dir)

    async def _read(self, path: Path) -> checkpoint.CheckpointState:
        state = await self._ctx.run_blocking(checkpoint.read, path)
        if state.job != self._job.name:
            raise CheckpointCorrupt(
                f"{path}: a checkpoint of job {state.job!r}, expected {self._job.name!r}; resume from one of its own"
            )
        return state

    async def write(self, step: int, *, final: bool, spared: tuple[int, ...] | None = None) -> None:
        """Write the present weights, which are those of ``step``; they are stored beside the next step.

        ``spared``: steps of older checkpoints that are not removed then; None: that is not known, so none is.
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
        """Write the model for others. If its library refuses, the checkpoint goes without it: training needs none."""
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
        """The block writes ``partial``: what it cannot write to its end it does not leave. Yields how much that is."""
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
        """Wait until the last one is stored."""
        if self._storing is not None:
            async with asyncio.timeout(2 * self._ctx.limits.checkpoint_timeout_s):
                await self._storing
            self._storing = None
