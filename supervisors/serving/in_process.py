"""Base models that this very process trains and samples: what ``supervisors/api/models.py`` computes with.

directories ─▶ base models ─┬─▶ LocalFactory: a torch backend for each model that is made
                            └─▶ LocalSampler: a torch engine for each base model, while the context lasts
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from actors.rollout.engine import EngineSpec
from actors.sampling.sampler import SamplerSetup, SnapshotSampler
from actors.tinker.service import ServedModel
from configs.limits import Limits
from supervisors.serving.local_models import BaseModel, LocalFactory, LocalSampler
from supervisors.serving.local_server import base_models


async def computed_here(
    models: Mapping[str, str | Path], closing: AsyncExitStack, limits: Limits
) -> tuple[list[ServedModel], LocalFactory]:
    """What a ``TinkerService`` needs to serve Hugging Face directories, by name; ``closing`` closes it.

    Raises:
        NotServable, EngineUnavailable, ModelUnreadable: one of them cannot be served.
    """
    bases = base_models([f"{name}={path}" for name, path in models.items()])
    samplers = {name: await _engine(base, closing, limits) for name, base in bases.items()}
    served = [
        ServedModel(name, str(base.path), base.vocabulary, base.context_tokens, samplers[name])
        for name, base in bases.items()
    ]
    return served, LocalFactory(bases, limits)


async def _engine(base: BaseModel, closing: AsyncExitStack, limits: Limits) -> LocalSampler:
    spec = EngineSpec(
        model_path=base.path, dtype=base.dtype, device=base.device, threads=base.threads,
        max_context_tokens=base.context_tokens,
    )  # fmt: skip
    sampler = SnapshotSampler(SamplerSetup(engine="torch", spec=spec), limits=limits)
    await sampler.start()
    closing.callback(asyncio.create_task(sampler.run(), name="sample").cancel)
    closing.push_async_callback(sampler.close)
    return LocalSampler(sampler, tries=1 + limits.infrastructure_retries)
