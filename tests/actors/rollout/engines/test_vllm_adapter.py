"""vLLM with versions that are adapters: it samples what the trainer trains, and refuses what it would serve wrongly."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest

from actors.models.adapter import AdapterSpec
from actors.rollout.engine import EngineSpec
from actors.rollout.errors import EngineError, ModelUnreadable
from benchmarks.gpu._model_family import make_model
from benchmarks.gpu.model_families import FAMILIES
from tests.actors.trainer.backends.test_adapter import ADAPTER, published, scores_of, started, train
from tests.contracts.test_rollout_engine_contract import ask, run
from tests.tiny_checkpoint import make_tiny_checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

if importlib.util.find_spec("vllm") is None and os.environ.get("HEADRACE_REQUIRE_VLLM") != "1":
    pytest.skip(
        "vLLM is not installed; `make vllm` adds it, HEADRACE_REQUIRE_VLLM=1 makes this a failure",
        allow_module_level=True,
    )

from actors.rollout.engines.vllm.adapters import lora_arguments
from actors.rollout.engines.vllm.engine import VllmEngine
from actors.rollout.engines.vllm.expected import expected_of


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), hidden=64, heads=2, kv_heads=1)


async def test_each_version_is_sampled_as_it_was_trained_also_behind_a_prompt_that_the_cache_knows(
    model_path: Path, tmp_path: Path
) -> None:
    """The prompt is longer than a block of the cache, and the same under every version."""
    backend, engine = await started(model_path), VllmEngine()
    await engine.start(EngineSpec(model_path=model_path, adapter=ADAPTER, max_running=4, max_context_tokens=96))
    prompt = [3 + n % 90 for n in range(40)]
    for version in (1, 2, 3):
        await train(backend, 1)
        manifest, tensors = await published(backend, tmp_path / str(version))
        dtypes = {entry.name: entry.dtype for entry in manifest.tensors}
        await engine.load_weights(tensors, dtypes, version, in_flight="recompute")
        for _ in range(2):
            sample = (await run(engine, ask(version, ids=prompt, max_tokens=12)))[version]
            trained = await scores_of(backend, sample.tokens, prompt=prompt)
            np.testing.assert_allclose(sample.logprobs, trained, atol=1e-4)
    assert engine.stats().prefix_hit_tokens_total == 3 * 32, "what a version has computed serves that version alone"
    await engine.close()
    await backend.close()


@pytest.mark.long
@pytest.mark.parametrize("tied", [True, False])
async def test_a_head_is_sampled_as_it_was_trained(tmp_path: Path, tied: bool) -> None:
    path = make_tiny_checkpoint(tmp_path / "model", hidden=64, heads=2, kv_heads=1, tied=tied)
    adapter = AdapterSpec(rank=4, alpha=8.0, targets=("all-linear", "lm_head"))
    backend, engine = await started(path, adapter=adapter), VllmEngine()
    await engine.start(EngineSpec(model_path=path, adapter=adapter, max_running=4, max_context_tokens=96))
    await train(backend)
    manifest, tensors = await published(backend, tmp_path / "segment")
    dtypes = {entry.name: entry.dtype for entry in manifest.tensors}
    await engine.load_weights(tensors, dtypes, 1, in_flight="recompute")
    sample = (await run(engine, ask(1, max_tokens=12)))[1]
    np.testing.assert_allclose(sample.logprobs, await scores_of(backend, sample.tokens), atol=1e-4)
    await engine.close()
    await backend.close()


@pytest.mark.long
async def test_a_family_in_which_vllm_has_no_adapter_of_the_head_is_refused_by_name(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, hidden=64, heads=2, kv_heads=1, architecture="qwen2")
    engine, adapter = VllmEngine(), AdapterSpec(rank=4, alpha=8.0, targets=("q_proj", "lm_head"))
    with pytest.raises(ModelUnreadable, match="vLLM has no adapters for lm_head of Qwen2ForCausalLM, only for"):
        await engine.start(EngineSpec(model_path=path, adapter=adapter, max_running=4, max_context_tokens=96))
    await engine.close()


def test_a_rank_gets_the_least_room_that_it_fits_into_and_one_that_fits_into_none_is_refused() -> None:
    assert lora_arguments(AdapterSpec(rank=12, alpha=1.0))["max_lora_rank"] == 16
    with pytest.raises(ModelUnreadable, match=r"model\.adapter\.rank is 600, and vLLM serves at most 512"):
        lora_arguments(AdapterSpec(rank=600, alpha=1.0))


async def test_what_the_adapter_needs_is_not_set_in_engine_options(model_path: Path) -> None:
    engine = VllmEngine()
    with pytest.raises(EngineError, match=r"engine_options\.max_lora_rank is set by Headrace"):
        await engine.start(EngineSpec(model_path=model_path, adapter=ADAPTER, options={"max_lora_rank": 8}))


@pytest.mark.parametrize(
    ("targets", "device", "said"),
    [
        (("q_proj", "experts.down_proj"), "cuda", "adapters of linear layers only"),
        (("q_proj",), "cpu", "build for CPUs cannot compute the experts of .* once it has adapters"),
    ],
)
def test_a_mixture_of_experts_that_it_would_not_compute_is_refused(
    targets: tuple[str, ...], device: str, said: str, tmp_path: Path
) -> None:
    make_model("qwen3_moe", FAMILIES["qwen3_moe"], tmp_path)
    adapter = AdapterSpec(rank=2, alpha=2.0, targets=targets)
    with pytest.raises(ModelUnreadable, match=said):
        expected_of(EngineSpec(model_path=tmp_path, adapter=adapter, device=device))
