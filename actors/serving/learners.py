"""What the models of clients are trained by: the trainer's parts over a backend, in this process or in a service.

    tinker server ─▶ BackendFactory ─▶ BackendLearner ─▶ Learner (``actors/trainer/learning``) ─▶ TrainBackend
                                                                             ServiceBackend of a training service, or
                                                                             a torch backend of this process

Models on one base model share its frozen weights, where they are trained.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from actors.core.errors import AskError
from actors.host.whole_file import flush_to_disk
from actors.models.adapter import AdapterSpec
from actors.protocol.datums import Datum
from actors.protocol.training import AdamStep
from actors.tinker.errors import LearnerBusy, LearnerLost, OperationRefused
from actors.tinker.learner import ModelSpec
from actors.trainer.backend import BackendSpec, TrainBackend
from actors.trainer.errors import (
    CallRefused,
    CheckpointCorrupt,
    ModelNotLoadable,
    ServiceBusy,
    ServiceRefuses,
    TrainerError,
)
from actors.trainer.learning.learner import Learner
from configs.adapter_schema import ALL_LINEAR
from configs.limits import Limits
from configs.model_files import HEAD
from configs.serving import ServedBase

_ALPHA: Final = 32.0
"""Alpha of every adapter, whatever its rank: clients name none."""
_BUDGET_TOKENS: Final = 4096
"""Padded tokens of one micro-batch."""
_ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP: Final = ("gate_proj", "up_proj", "down_proj")

MakeBackend = Callable[[int], Awaitable[TrainBackend]]
"""Makes a backend, without starting it, for the model of that number."""


class BackendFactory:
    """Makes learners of ``bases``, by the names that clients use."""

    def __init__(
        self, bases: Mapping[str, ServedBase], make: MakeBackend, limits: Limits, *, device: str, threads: int
    ) -> None:
        """``device``, ``threads``: where backends compute, and with how many threads; 0: their service says it."""
        self._bases, self._make, self._limits = dict(bases), make, limits
        self._device, self._threads = device, threads

    def check(self, spec: ModelSpec) -> None:
        if spec.rank and not (spec.train_mlp or spec.train_attn or spec.train_unembed):
            raise OperationRefused("lora_config: trains nothing; set train_mlp, train_attn or train_unembed")

    async def make(self, spec: ModelSpec, number: int) -> BackendLearner:
        self.check(spec)
        base = self._bases[spec.base_model]
        with _translated():
            backend = await self._make(number)
            try:
                await backend.start(
                    BackendSpec(
                        model_path=base.path, dtype=base.dtype, device=self._device, threads=self._threads,
                        seed=spec.seed, adapter=adapter_of(spec),
                    )
                )  # fmt: skip
            except BaseException:
                with contextlib.suppress(TrainerError, OSError):
                    await backend.close(keep=False)
                raise
        learner = Learner(
            backend, vocabulary=base.vocabulary, context_tokens=base.context_tokens, budget_tokens=_BUDGET_TOKENS
        )
        return BackendLearner(learner, backend, self._limits.checkpoint_timeout_s)


def adapter_of(spec: ModelSpec) -> AdapterSpec | None:
    """The adapter of the parts that a client named; None: it trains the whole model."""
    if not spec.rank:
        return None
    inner = (_ATTENTION if spec.train_attn else ()) + (_MLP if spec.train_mlp else ())
    targets = (ALL_LINEAR,) if spec.train_attn and spec.train_mlp else inner
    return AdapterSpec(rank=spec.rank, alpha=_ALPHA, targets=targets + ((HEAD,) if spec.train_unembed else ()))


class BackendLearner:
    """Implements the ``Learner`` of the Tinker server over a backend."""

    def __init__(self, learner: Learner, backend: TrainBackend, disk_s: float) -> None:
        """``disk_s``: time within which the disk must have what was written."""
        self._learner, self._backend, self._disk_s = learner, backend, disk_s

    async def forward_backward(
        self, datums: list[Datum], loss: str, parameters: dict[str, float], *, forward_only: bool
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        with _translated():
            told = await self._learner.forward_backward(datums, loss, parameters, forward_only=forward_only)
        return told.logprobs, told.metrics

    async def optim_step(self, adam: AdamStep) -> dict[str, float]:
        with _translated():
            told = await self._learner.optim_step(adam)
        if told.pop("skipped"):
            raise OperationRefused("the gradient is not finite: no step was taken, and the gradient is forgotten")
        return told

    async def save(self, directory: Path) -> None:
        with _translated():
            await self._learner.save(directory)
        await self._flushed(directory)

    async def load(self, directory: Path, *, optimizer: bool) -> None:
        with _translated():
            await self._learner.load(directory, optimizer=optimizer)

    async def export(self, directory: Path) -> None:
        with _translated():
            directory.mkdir(parents=True, exist_ok=True)
            await self._learner.export(directory)
        await self._flushed(directory)

    async def _flushed(self, directory: Path) -> None:
        try:
            async with asyncio.timeout(self._disk_s):
                await asyncio.to_thread(_flush_all, directory)
        except (TimeoutError, OSError) as error:
            raise LearnerLost(f"{directory} is not on the disk: {error or f'within {self._disk_s:g} s'}") from error

    async def close(self) -> None:
        with contextlib.suppress(TrainerError, OSError):
            await self._backend.close(keep=False)


@contextmanager
def _translated() -> Iterator[None]:
    """Raise what the trainer's parts raise as the Tinker server's own errors."""
    try:
        yield
    except (CallRefused, CheckpointCorrupt, ModelNotLoadable, ServiceRefuses) as error:
        raise OperationRefused(str(error)) from error
    except ServiceBusy as error:
        raise LearnerBusy(str(error)) from error
    except (TrainerError, AskError, OSError) as error:
        raise LearnerLost(f"{type(error).__name__}: {error}") from error


def _flush_all(directory: Path) -> None:
    """Have all files of a directory on the disk. Blocks."""
    for file in sorted(directory.rglob("*")):
        if file.is_file():
            flush_to_disk(file)
