"""What ``headrace serve`` computes with: a torch backend for each model of a client, one engine for each base model.

    tinker server ─┬─▶ LocalFactory ─▶ LocalLearner ─▶ Learner (``actors/trainer``) ─▶ torch backend
                   └─▶ LocalSampler ─▶ SnapshotSampler (``actors/sampling``) ─▶ torch engine

All of it is in the server's process. Models on one base model share its frozen weights.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from actors.host.whole_file import flush_to_disk
from actors.models.adapter import AdapterSpec
from actors.protocol.datums import Datum
from actors.protocol.sampling import SampleRequest, SampleResult
from actors.protocol.training import AdamStep
from actors.sampling.errors import BadSampleRequest, EngineLost, SamplerClosed, SnapshotUnusable
from actors.sampling.sampler import SnapshotSampler
from actors.tinker.errors import LearnerLost, OperationRefused
from actors.tinker.learner import ModelSpec
from actors.tinker.sampling import Sampled, SampledSequence, SamplingParameters, TopTokens
from actors.trainer.backend import BackendSpec, TrainBackend
from actors.trainer.errors import CallRefused, CheckpointCorrupt, ModelNotLoadable, TrainerError
from actors.trainer.learning.learner import Learner
from actors.trainer.setup import make_backend
from configs.adapter_schema import ALL_LINEAR
from configs.limits import Limits
from configs.model_files import HEAD
from transport.errors import HeadraceError

_ALPHA: Final = 32.0
"""Alpha of every adapter, whatever its rank: clients name none."""
_BUDGET_TOKENS: Final = 4096
"""Padded tokens of one micro-batch."""
_ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP: Final = ("gate_proj", "up_proj", "down_proj")
_NOT_THERE: Final = -99999.0
"""Log-probability where there is none, as the client has it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseModel:
    """Describes a base model that is served."""

    path: Path
    vocabulary: int
    context_tokens: int
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1


class LocalFactory:
    """Makes learners of ``bases``, by the names that clients use."""

    def __init__(self, bases: Mapping[str, BaseModel], limits: Limits) -> None:
        self._bases, self._limits = dict(bases), limits

    def check(self, spec: ModelSpec) -> None:
        if spec.rank and not (spec.train_mlp or spec.train_attn or spec.train_unembed):
            raise OperationRefused("lora_config: trains nothing; set train_mlp, train_attn or train_unembed")

    async def make(self, spec: ModelSpec) -> LocalLearner:
        self.check(spec)
        base = self._bases[spec.base_model]
        backend = make_backend("torch")
        with _translated():
            await backend.start(
                BackendSpec(
                    model_path=base.path, dtype=base.dtype, device=base.device, threads=base.threads, seed=spec.seed,
                    adapter=adapter_of(spec),
                )
            )  # fmt: skip
        learner = Learner(
            backend, vocabulary=base.vocabulary, context_tokens=base.context_tokens, budget_tokens=_BUDGET_TOKENS
        )
        return LocalLearner(learner, backend, self._limits.checkpoint_timeout_s)


def adapter_of(spec: ModelSpec) -> AdapterSpec | None:
    """The adapter of the parts that a client named; None: it trains the whole model."""
    if not spec.rank:
        return None
    inner = (_ATTENTION if spec.train_attn else ()) + (_MLP if spec.train_mlp else ())
    targets = (ALL_LINEAR,) if spec.train_attn and spec.train_mlp else inner
    return AdapterSpec(rank=spec.rank, alpha=_ALPHA, targets=targets + ((HEAD,) if spec.train_unembed else ()))


class LocalLearner:
    """Implements the ``Learner`` of the Tinker server over a backend of its own."""

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
        await self._backend.close()


@contextmanager
def _translated() -> Iterator[None]:
    """Raise what the trainer's parts raise as the Tinker server's own errors."""
    try:
        yield
    except (CallRefused, CheckpointCorrupt, ModelNotLoadable) as error:
        raise OperationRefused(str(error)) from error
    except (TrainerError, OSError) as error:
        raise LearnerLost(f"{type(error).__name__}: {error}") from error


def _flush_all(directory: Path) -> None:
    """Have all files of a directory on the disk. Blocks."""
    for file in sorted(directory.rglob("*")):
        if file.is_file():
            flush_to_disk(file)


class LocalSampler:
    """Implements the ``Sampler`` of the Tinker server over one engine, for as long as ``run`` runs."""

    def __init__(self, sampler: SnapshotSampler, *, tries: int) -> None:
        """``tries``: how often a request is asked that an engine has failed under."""
        self._sampler, self._tries = sampler, tries

    async def sample(
        self, snapshot: Path | None, prompt: np.ndarray, n: int, parameters: SamplingParameters, *,
        prompt_logprobs: bool, topk_prompt_logprobs: int,
    ) -> Sampled:  # fmt: skip
        wanted = parameters
        stop = None if wanted.stops_at_eos else (*wanted.stop_tokens, *wanted.stop_texts)
        request = SampleRequest(
            prompt=prompt,
            snapshot=None if snapshot is None else str(snapshot),
            samples=n,
            max_tokens=wanted.max_tokens,
            temperature=wanted.temperature,
            top_k=wanted.top_k,
            top_p=wanted.top_p,
            seed=wanted.seed,
            stop=stop,
            prompt_logprobs=prompt_logprobs,
            top_prompt_logprobs=topk_prompt_logprobs,
        )
        return _sampled(await self._asked(request))

    async def _asked(self, request: SampleRequest) -> SampleResult:
        for left in reversed(range(self._tries)):
            try:
                return await self._sampler.sample(request)
            except (BadSampleRequest, SnapshotUnusable) as error:
                raise OperationRefused(str(error)) from error
            except EngineLost:
                if not left:
                    raise
        raise SamplerClosed("no request is tried")


def _sampled(result: SampleResult) -> Sampled:
    top = None
    if result.top_prompt_ids is not None and result.top_prompt_logprobs is not None:
        top = TopTokens(
            tokens=np.maximum(result.top_prompt_ids, 0),
            logprobs=np.nan_to_num(result.top_prompt_logprobs, nan=_NOT_THERE),
        )
    sequences = [SampledSequence(one.stop_reason == "stop", one.tokens, one.logprobs) for one in result.sequences]
    return Sampled(sequences, result.prompt_logprobs, top)


class NotServable(HeadraceError):
    """Configuration: a directory holds no model that can be served; the message says why."""

    permanent = True
