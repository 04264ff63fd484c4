"""The sampler as an actor: several questions at once, askers that give up, errors as answers, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from actors.core.errors import AskError, DeadlineExceeded, RemoteError, Unanswerable
from actors.core.ref import ActorRef
from actors.core.system import ActorSystem
from actors.protocol.sampling import AskSample, Sampled, SampleRequest
from actors.rollout.engine import EngineSpec
from actors.sampling.errors import BadSampleRequest
from actors.sampling.sampler import SamplerSetup
from actors.sampling.service import SamplerService
from tests.actors.sampling.sampling_world import CONTEXT_TOKENS, ask, said
from tests.simulated import run_simulated
from transport.address import PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport


def in_world(scenario: Callable[[ActorRef, SamplerService], Awaitable[None]]) -> None:
    """A sampler in one process, asked from another."""

    async def main() -> None:
        network = MemoryNetwork()
        here, there = (ActorSystem(MemoryTransport(network, PeerId(name, 1))) for name in ("here", "there"))
        await here.start()
        await there.start()
        spec = EngineSpec(model_path=Path("none"), max_running=4, max_context_tokens=CONTEXT_TOKENS)
        actor = SamplerService(SamplerSetup(engine="simulated", spec=spec, end_tokens=(1,)))
        await here.spawn("sampler", actor)
        try:
            await scenario(there.ref(here.address("sampler")), actor)
        finally:
            await there.stop()
            await here.stop()

    run_simulated(main())


async def answer(sampler: ActorRef, request: SampleRequest, timeout_s: float = 60.0) -> Sampled:
    return await sampler.ask(AskSample(request=request), Sampled, timeout_s)


def test_questions_are_answered_beside_each_other() -> None:
    async def scenario(sampler: ActorRef, _: SamplerService) -> None:
        long = asyncio.ensure_future(
            answer(sampler, ask(max_tokens=90, samples=2, prompt_logprobs=True, top_prompt_logprobs=2))
        )
        await asyncio.sleep(0.05)
        short = await answer(sampler, ask(max_tokens=2))
        assert not long.done() and len(short.result.sequences[0].tokens) == 2
        result = (await long).result
        assert [len(one.tokens) for one in result.sequences] == [90, 90]
        assert result.prompt_logprobs is not None and np.isnan(result.prompt_logprobs[0])
        again = await answer(sampler, ask(max_tokens=90, samples=2, prompt_logprobs=True, top_prompt_logprobs=2))
        assert said(again.result) == said(result)

    in_world(scenario)


def test_an_error_is_an_answer_and_the_sampler_lives_on() -> None:
    async def scenario(sampler: ActorRef, _: SamplerService) -> None:
        with pytest.raises(Unanswerable, match=r"top_p is 7\.0: expected above 0") as told:
            await answer(sampler, ask(top_p=7.0))
        assert isinstance(told.value.raised, BadSampleRequest)
        with pytest.raises(RemoteError, match="expected a directory"):
            await answer(sampler, ask(Path("nowhere")))
        await answer(sampler, ask())

    in_world(scenario)


def test_whoever_stops_waiting_ends_what_is_computed_for_it() -> None:
    async def scenario(sampler: ActorRef, actor: SamplerService) -> None:
        with pytest.raises(DeadlineExceeded):
            await answer(sampler, ask(max_tokens=90, samples=4), timeout_s=0.1)
        await asyncio.sleep(0.1)
        assert actor._sampler._running == {}
        await answer(sampler, ask())

    in_world(scenario)


def test_a_sampler_that_ends_answers_all_with_an_error() -> None:
    async def scenario(sampler: ActorRef, actor: SamplerService) -> None:
        asked = [asyncio.ensure_future(answer(sampler, ask(max_tokens=90))) for _ in range(3)]
        await asyncio.sleep(0.05)
        actor.ctx.stop()
        for one in asked:
            with pytest.raises(AskError):
                await one

    in_world(scenario)
