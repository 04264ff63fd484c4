"""The actor around a sampler: answers ``AskSample``, as many at once as come.

    caller ──AskSample──▶ SamplerService ─▶ SnapshotSampler.sample ─▶ Sampled ──▶ caller
                                             run, as a task: if it ends, so does the actor

A caller that gives up, or is gone, cancels its question, and with it what the engine computes for it.
"""

from __future__ import annotations

import os

from actors.core.actor import Actor, concurrent, handles
from actors.protocol.sampling import AskSample, Sampled
from actors.roles import ServingArgs
from actors.rollout.engine import EngineSpec
from actors.sampling.sampler import SamplerSetup, SnapshotSampler
from configs.serving import served_base


class SamplerService(Actor):
    """Serves one base model and its snapshots with one engine."""

    def __init__(self, setup: SamplerSetup) -> None:
        self._setup = setup

    async def on_start(self) -> None:
        self._sampler = SnapshotSampler(
            self._setup,
            limits=self.ctx.limits,
            rng=self.ctx.rng("sampler"),
            run_blocking=self.ctx.run_blocking,
        )
        await self._sampler.start()
        self.ctx.start_task(self._sampler.run(), "sample")

    async def on_stop(self) -> None:
        await self._sampler.close()

    @handles(AskSample)
    @concurrent
    async def sample(self, message: AskSample) -> Sampled:
        return Sampled(result=await self._sampler.sample(message.request))


def build(args: ServingArgs) -> dict[str, Actor]:
    """The actors of a process that samples the base model ``args.model``, by name."""
    config = args.config
    base = served_base(next(model for model in config.models if model.name == args.model))
    spec = EngineSpec(
        model_path=base.path,
        dtype=base.dtype,
        device=config.device,
        threads=config.threads or len(os.sched_getaffinity(0)),
        max_context_tokens=base.context_tokens,
    )
    return {args.name: SamplerService(SamplerSetup(engine="torch", spec=spec))}
