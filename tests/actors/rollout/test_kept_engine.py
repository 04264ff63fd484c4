"""The engine that stays when its worker leaves a job serves the next job exactly as one that was started for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from actors.models.adapter import AdapterSpec
from actors.protocol.work import SamplingParams
from actors.rollout import kept_engine
from actors.rollout.engine import EngineSpec, GenerationRequest, RolloutEngine
from actors.rollout.engine_kinds import create_engine
from actors.rollout.engines.simulated_engine import SimulatedEngine
from actors.rollout.errors import EngineError
from tests.tiny_checkpoint import make_tiny_checkpoint


@pytest.fixture(autouse=True)
def process_that_may_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_engine, "_allowed", True)
    monkeypatch.setattr(kept_engine, "_kept", None)


def spec_of(model: Path, *, seed: int = 0, max_running: int = 4) -> EngineSpec:
    return EngineSpec(model_path=model, max_running=max_running, max_context_tokens=48, seed=seed)


async def started(spec: EngineSpec) -> RolloutEngine:
    engine = create_engine("torch")
    await engine.start(spec)
    return engine


async def load(engine: RolloutEngine, model: Path, version: int) -> None:
    tensors = load_file(model / "model.safetensors")
    dtypes = {name: str(array.dtype) for name, array in tensors.items()}
    await engine.load_weights(tensors, dtypes, version, in_flight="recompute")


async def generate(engine: RolloutEngine, prompts: Sequence[int]) -> list[int]:
    sampling = SamplingParams(max_tokens=8, temperature=1.0, seed=5)
    engine.add(
        [
            GenerationRequest(
                request=prompt, prompt=prompt, sibling=0, prompt_ids=np.arange(3, 9 + prompt, dtype=np.int32),
                generated=np.zeros(0, np.int32), sampling=sampling,
            )
            for prompt in prompts
        ]
    )  # fmt: skip
    tokens: dict[int, list[int]] = {prompt: [] for prompt in prompts}
    while engine.has_work:
        output = await engine.step()
        start = 0
        for request, count in zip(output.requests.tolist(), output.counts.tolist(), strict=True):
            tokens[request] += output.tokens[start : start + count].tolist()
            start += count
    return [token for prompt in prompts for token in tokens[prompt]]


async def test_a_kept_engine_serves_the_next_job_of_that_shape_once_its_weights_are_loaded_and_not_before(tmp_path):
    first = make_tiny_checkpoint(tmp_path / "first", seed=1)
    second = make_tiny_checkpoint(tmp_path / "second", seed=2)
    engine = await started(spec_of(first))
    await generate(engine, [0, 1])
    await kept_engine.keep_or_close(engine, spec_of(first))

    taken = await kept_engine.take("torch", spec_of(second, seed=9))
    assert taken is engine
    with pytest.raises(EngineError):
        await generate(taken, [0])
    await load(taken, second, 0)
    taken.abort([0])
    while taken.has_work:
        await taken.step()
    fresh = await started(spec_of(second, seed=9))
    assert await generate(taken, [2, 3]) == await generate(fresh, [2, 3])
    await taken.close()
    await fresh.close()


async def test_an_engine_whose_versions_are_adapters_is_not_kept_for_its_model_is_the_jobs(tmp_path: Path) -> None:
    spec = dataclasses.replace(
        spec_of(make_tiny_checkpoint(tmp_path / "model")), adapter=AdapterSpec(rank=2, alpha=4.0)
    )
    await kept_engine.keep_or_close(await started(spec), spec)
    assert await kept_engine.take("torch", spec) is None


@pytest.mark.parametrize("other", ["shape", "spec", "kind"])
async def test_an_engine_that_would_be_built_otherwise_is_closed_and_not_kept_any_longer(tmp_path, other: str):
    model = make_tiny_checkpoint(tmp_path / "model")
    wider = make_tiny_checkpoint(tmp_path / "wider", hidden=64)
    await kept_engine.keep_or_close(await started(spec_of(model)), spec_of(model))
    wanted = {"shape": spec_of(wider), "spec": spec_of(model, max_running=5), "kind": spec_of(model)}[other]
    assert await kept_engine.take("simulated" if other == "kind" else "torch", wanted) is None
    assert await kept_engine.take("torch", spec_of(model)) is None


async def test_a_process_that_never_stays_keeps_no_engine(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kept_engine, "_allowed", False)
    model = make_tiny_checkpoint(tmp_path / "model")
    await kept_engine.keep_or_close(await started(spec_of(model)), spec_of(model))
    assert await kept_engine.take("torch", spec_of(model)) is None


async def test_a_kept_engine_that_does_not_wake_is_closed_and_a_new_one_can_be_started(tmp_path: Path) -> None:
    closed: list[bool] = []

    class Asleep(SimulatedEngine):
        async def wake(self) -> None:
            raise OSError("the former job's model is gone")

        async def close(self) -> None:
            closed.append(True)
            await super().close()

    await kept_engine.keep_or_close(Asleep(), spec_of(tmp_path))
    assert await kept_engine.take("simulated", spec_of(tmp_path)) is None
    assert closed == [True]
