"""Base models that this very process trains and samples: what ``supervisors/api/models.py`` computes with.

directories ─▶ base models ─┬─▶ BackendFactory: a torch backend for each model that is made
                            └─▶ EngineSampler: a torch engine for each base model, while the context lasts
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from actors.rollout.engine import EngineSpec
from actors.sampling.sampler import SamplerSetup, SnapshotSampler
from actors.serving.learners import BackendFactory
from actors.serving.samplers import EngineSampler
from actors.tinker.service import ServedModel
from actors.trainer.backend import TrainBackend
from actors.trainer.setup import make_backend
from configs.errors import ConfigError, Problem
from configs.limits import Limits
from configs.serving import ServedBase, ServingConfig, models_named, problems_of, served_base


async def computed_here(
    models: Mapping[str, str | Path], closing: AsyncExitStack, limits: Limits
) -> tuple[list[ServedModel], BackendFactory]:
    """What a ``TinkerService`` needs to serve Hugging Face directories, by name; ``closing`` closes it.

    Raises:
        ConfigError: one of them holds no model, or its name cannot be used.
        EngineUnavailable, ModelUnreadable: one of them cannot be served.
    """
    config = ServingConfig(models=models_named([f"{name}={path}" for name, path in models.items()]))
    if problems := [Problem("serve", *found) for found in problems_of(config)]:
        raise ConfigError(problems)
    bases = {model.name: served_base(model) for model in config.models}
    served = [
        ServedModel(
            name, str(base.path), base.vocabulary, base.context_tokens, await _engine(base, closing, limits)
        )
        for name, base in bases.items()
    ]  # fmt: skip
    return served, BackendFactory(bases, _backend, limits, device="cpu", threads=1)


async def _backend(_: int) -> TrainBackend:
    return make_backend("torch")


async def _engine(base: ServedBase, closing: AsyncExitStack, limits: Limits) -> EngineSampler:
    spec = EngineSpec(model_path=base.path, dtype=base.dtype, max_context_tokens=base.context_tokens)
    sampler = SnapshotSampler(SamplerSetup(engine="torch", spec=spec), limits=limits)
    await sampler.start()
    closing.callback(asyncio.create_task(sampler.run(), name="sample").cancel)
    closing.push_async_callback(sampler.close)
    return EngineSampler(sampler.sample)
