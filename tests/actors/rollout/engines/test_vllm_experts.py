"""A vLLM that spoils the experts when it loads them again is refused at the start; one that does not is not."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest

from actors.protocol.work import SamplingParams
from actors.rollout.engine import EngineSpec, GenerationRequest
from actors.rollout.errors import ModelUnreadable
from benchmarks.gpu._model_family import make_model
from benchmarks.gpu.model_families import FAMILIES
from tests.tiny_checkpoint import save_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(400)]

if importlib.util.find_spec("vllm") is None and os.environ.get("HEADRACE_REQUIRE_VLLM") != "1":
    pytest.skip("vLLM is not installed", allow_module_level=True)

from actors.rollout.engines.vllm import reload_probe
from actors.rollout.engines.vllm.core import VllmCore
from actors.rollout.engines.vllm.engine import VllmEngine


async def test_experts_that_come_out_wrong_from_a_reload_are_refused_and_right_ones_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's build for CPUs packs experts once. A reload that is left out stands for one that works."""
    shape = {"vocab_size": 100, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    make_model("qwen3_moe", {**FAMILIES["qwen3_moe"], **shape, "moe_intermediate_size": 64}, tmp_path)
    save_tokenizer(tmp_path)
    spec = EngineSpec(model_path=tmp_path, max_running=4, max_context_tokens=64)
    engine = VllmEngine()
    with pytest.raises(
        ModelUnreadable, match=r"cannot follow the training .*experts.* apart; set rollout\.engine: torch"
    ):
        await engine.start(spec)
    assert VllmCore._live is None
    monkeypatch.setattr(reload_probe, "fill", lambda *_: None)
    engine = VllmEngine()
    await engine.start(spec)
    try:
        ids = np.arange(5, 20, dtype=np.int32)
        sampling = SamplingParams(max_tokens=4, temperature=1.0, seed=3)
        engine.add(
            [GenerationRequest(request=1, prompt=0, sibling=0, prompt_ids=ids, generated=ids[:0], sampling=sampling)]
        )
        assert sum([len((await engine.step()).tokens) for _ in range(9) if engine.has_work]) == 4
    finally:
        await engine.close()
