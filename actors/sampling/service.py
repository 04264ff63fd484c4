"""The actor around a sampler: answers ``AskSample``, as many at once as come.

    caller ──AskSample──▶ SamplerService ─▶ SnapshotSampler.sample ─▶ Sampled ──▶ caller
                                             run, as a task: if it ends, so does the actor

A caller that gives up, or is gone, cancels its question, and with it what the engine computes for it.
"""

from __future__ import annotations

from actors.core.actor import Actor, concurrent, handles
from actors.protocol.sampling import AskSample, Sampled
from actors.sampling.sampler import SamplerSetup, SnapshotSampler


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


def build(name: str, setup: SamplerSetup) -> dict[str, Actor]:
    """The actors of a process that samples, by name."""
    return {name: SamplerService(setup)}
