"""Two ranks of vLLM beside one: they say the same, and one that falls silent ends the engine in time."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from actors.ranks.errors import RankLost
from actors.rollout.engine import EngineSpec, RolloutEngine
from actors.rollout.engine_kinds import create_engine
from configs.limits import Limits
from tests.contracts.test_rollout_engine_contract import Sample, ask, finish, record, weights_of
from tests.rank_processes import RankProcesses
from tests.tiny_checkpoint import make_tiny_checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(600)]

if importlib.util.find_spec("vllm") is None and os.environ.get("HEADRACE_REQUIRE_VLLM") != "1":
    pytest.skip("vLLM is not installed (make vllm)", allow_module_level=True)

LIMITS = Limits(engine_step_s=4.0)
"""A rank may be silent for as long."""


def spec_of(model: Path, ranks: int) -> EngineSpec:
    return EngineSpec(model_path=model, device="cpu", max_running=16, max_context_tokens=96, tensor_parallel=ranks)


async def rows(engine: RolloutEngine, model: Path) -> list[Sample]:
    """Of 16 samples whose weights change while they run, and of which some are moved and one is aborted."""
    samples: dict[int, Sample] = {}
    engine.add([ask(n, prompt=n // 4, sibling=n % 4, max_tokens=20 + 3 * n, top_k=n % 2 * 7) for n in range(12)])
    record(await engine.step(), samples)
    engine.add([ask(n, prompt=n, generated=[7, 8, 9], max_tokens=24, temperature=0.0) for n in range(12, 16)])
    engine.abort([3])
    await finish(engine, samples)
    await engine.load_weights(*weights_of(model, shift=0.05), 1, in_flight="recompute")
    engine.add([ask(n, prompt=n // 4, sibling=n % 4, max_tokens=40) for n in range(20, 36)])
    await finish(engine, samples)
    return [samples[n] for n in sorted(samples) if n != 3]  # how far that one gets, a clock says


async def test_two_ranks_say_what_one_says_and_one_that_falls_silent_ends_the_engine(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path / "model", hidden=64, heads=2, kv_heads=1)
    one = create_engine("vllm")
    await one.start(spec_of(model, 1))
    expected = await rows(one, model)
    await one.close()

    processes = RankProcesses("vllm", 2)
    try:
        two = create_engine("vllm", processes.followers(), LIMITS)
        await two.start(spec_of(model, 2))
        found = await rows(two, model)
        assert len(found) == 31
        for one_rank, two_ranks in zip(expected, found, strict=True):
            assert one_rank.tokens == two_ranks.tokens and one_rank.finished == two_ranks.finished
            np.testing.assert_allclose(two_ranks.logprobs, one_rank.logprobs, atol=1e-5)

        two.add([ask(90, max_tokens=80)])
        processes.processes[0].send_signal(signal.SIGSTOP)
        began_s = time.monotonic()
        with pytest.raises(RankLost):
            async with asyncio.timeout(4 * LIMITS.engine_step_s):
                while two.has_work:
                    await two.step()
        print(f"a silent rank was given up after {time.monotonic() - began_s:.1f} s")
        await two.close()
    finally:
        processes.close()
