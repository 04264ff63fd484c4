"""``rollout.max_running: auto``: each engine says by its own account how many sequences it decodes together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.protocol.work import SamplingParams
from actors.rollout.engine import SLOTS_MAX, EngineSpec, GenerationRequest, RolloutEngine, slots_of
from actors.rollout.engine_kinds import create_engine
from actors.rollout.engines.torch import kv_cache
from actors.rollout.worker_spec import engine_spec
from tests.smallest_job import smallest_job
from tests.tiny_checkpoint import make_tiny_checkpoint

CONTEXT = 128
TOKEN_BYTES = 2 * 2 * 2 * 32 * 4
"""Keys and values, of 2 layers, with 2 heads of 32 numbers each."""


async def most_at_once(engine: RolloutEngine, count: int) -> int:
    """How many of ``count`` samples the engine runs together."""
    sampling = SamplingParams(max_tokens=40, temperature=1.0, stop_token_ids=(), seed=7, top_k=0, top_p=1.0)
    prompts = [np.arange(3, 9, dtype=np.int32) + i for i in range(count)]
    engine.add(
        [
            GenerationRequest(
                request=i, prompt=i, sibling=0, prompt_ids=ids, generated=np.zeros(0, np.int32), sampling=sampling
            )
            for i, ids in enumerate(prompts)
        ]
    )
    running = 0
    while engine.has_work:
        await engine.step()
        running = max(running, engine.stats().running)
    return running


async def started(kind: str, path: Path, max_running: int = 0, **options: Any) -> RolloutEngine:
    engine = create_engine(kind)
    spec = EngineSpec(model_path=path, max_running=max_running, max_context_tokens=CONTEXT, options=options)
    await engine.start(spec)
    return engine


async def test_the_torch_engine_counts_full_rows_in_half_of_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = EngineSpec(model_path=tmp_path).prefix_cache_bytes + 2 * 5 * CONTEXT * TOKEN_BYTES
    monkeypatch.setattr(kv_cache, "free_bytes", lambda device: room)
    engine = await started("torch", make_tiny_checkpoint(tmp_path, hidden=128, heads=4, kv_heads=2))
    assert engine.slots == 5
    assert await most_at_once(engine, 9) == 5
    await engine.close()


async def test_the_torch_engine_always_takes_one_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "free_bytes", lambda device: 0)
    engine = await started("torch", make_tiny_checkpoint(tmp_path))
    assert engine.slots == 1
    await engine.close()


@pytest.mark.parametrize(("kv_tokens", "slots"), [(3 * CONTEXT, 6), (0, SLOTS_MAX), (1, 1)])
async def test_the_simulated_engine_counts_its_cache(tmp_path: Path, kv_tokens: int, slots: int) -> None:
    engine = await started("simulated", tmp_path, kv_tokens=kv_tokens)
    assert engine.slots == slots
    assert await most_at_once(engine, 9) <= slots
    await engine.close()


@pytest.mark.parametrize("kind", ["torch", "simulated"])
async def test_a_number_in_the_job_file_is_taken_as_it_is(tmp_path: Path, kind: str) -> None:
    engine = await started(kind, make_tiny_checkpoint(tmp_path), max_running=3)
    assert engine.slots == 3
    await engine.close()


def test_an_account_has_bounds() -> None:
    assert [slots_of(tokens, 100, sets_aside=False) for tokens in (-5, 0, 250, 10**9)] == [1, 1, 2, SLOTS_MAX]


def test_a_job_that_leaves_the_number_to_its_engines_says_so_in_the_spec(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path)
    auto = engine_spec(smallest_job(rollout={"max_running": "auto", "workers": 3}), str(tmp_path))
    assert (auto.max_running, auto.memory_share) == (0, 0.25)
    assert engine_spec(smallest_job(rollout={"max_running": 9}), str(tmp_path)).max_running == 9
