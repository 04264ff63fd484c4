"""The simulated engine's costs, on a virtual clock. What it promises as an engine: the contract suite."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from actors.protocol.work import EngineStats, SamplingParams
from actors.rollout.engine import EngineSpec, GenerationRequest
from actors.rollout.engines.simulated_engine import SimulatedEngine, whole_response
from tests.simulated import run_simulated


async def seconds_to_start(**options: float) -> float:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    spec = EngineSpec(
        model_path=Path("none"), dtype="float32", device="cpu", max_running=4, max_context_tokens=64, threads=1, seed=0,
        options=options,
    )  # fmt: skip
    await SimulatedEngine().start(spec)
    return loop.time() - began_s


def test_a_start_takes_as_long_as_the_options_say_and_no_time_by_default() -> None:
    assert run_simulated(seconds_to_start(start_s=6.0)) == 6.0
    assert run_simulated(seconds_to_start()) == 0.0


def lengths(prompt: int, text: int, by_prompt: float) -> list[int]:
    """Of 200 siblings."""
    sampling = SamplingParams(max_tokens=10_000, seed=1, stop_token_ids=(2,))
    ids, nothing = np.array([text, 7], np.int32), np.empty(0, np.int32)
    options = {"mean_tokens": 100.0, "by_prompt": by_prompt}
    asked = (
        GenerationRequest(request=i, prompt=prompt, sibling=i, prompt_ids=ids, generated=nothing, sampling=sampling)
        for i in range(200)
    )
    return [len(whole_response(one, options, 20_000)) for one in asked]


def test_a_length_is_the_prompts_as_far_as_it_is_told_and_the_same_in_each_epoch() -> None:
    whole = lengths(prompt=3, text=11, by_prompt=1.0)
    assert len(set(whole)) == 1
    assert lengths(prompt=40, text=11, by_prompt=1.0) == whole, "the same prompt comes again under another number"
    assert lengths(prompt=3, text=12, by_prompt=1.0) != whole
    apart, nearly = lengths(3, 11, by_prompt=0.0), lengths(3, 11, by_prompt=0.8)
    assert np.std(nearly) == pytest.approx(0.2 * np.std(apart), rel=0.1)
    means = [float(np.mean(lengths(3, text, by_prompt=0.8))) for text in range(11, 41)]
    assert np.mean(means) == pytest.approx(100, rel=0.3)


async def _generated(**options: float) -> tuple[dict[int, list[int]], EngineStats]:
    engine = SimulatedEngine()
    spec = EngineSpec(model_path=Path("none"), max_running=4, max_context_tokens=64, options=options)
    await engine.start(spec)
    sampling, nothing = SamplingParams(max_tokens=20, seed=1), np.empty(0, np.int32)
    ids = np.array([5, 7], np.int32)
    asked = [
        GenerationRequest(request=i, prompt=0, sibling=i, prompt_ids=ids, generated=nothing, sampling=sampling)
        for i in range(6)
    ]
    engine.add(asked[:5])
    engine.add(asked[5:])
    said: dict[int, list[int]] = {i: [] for i in range(6)}
    while engine.has_work:
        output = await engine.step()
        if options.get("preempts"):
            assert engine._held() <= options["kv_tokens"] + 4 + len(ids) or len(engine._running) == 1
        ends = np.cumsum(output.counts)
        for number, end, count in zip(output.requests.tolist(), ends.tolist(), output.counts.tolist(), strict=True):
            said[number] += output.tokens[end - count : end].tolist()
    return said, engine.stats()


@pytest.mark.parametrize("kv_tokens", [10, 40])
def test_sequences_that_its_cache_does_not_hold_are_set_aside_counted_and_end_as_without(kv_tokens: int) -> None:
    free, roomy = run_simulated(_generated())
    said, stats = run_simulated(_generated(kv_tokens=kv_tokens, preempts=1))
    assert said == free and all(len(tokens) == 20 for tokens in said.values())
    assert stats.preemptions_total > 0 == roomy.preemptions_total
    assert stats.busy_s_total > roomy.busy_s_total
    assert stats.prefilled_tokens_total == roomy.prefilled_tokens_total, "what is computed again is not counted twice"
    assert run_simulated(_generated(kv_tokens=kv_tokens))[1].preemptions_total == 0
