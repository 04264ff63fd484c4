"""An adapter of the output embedding, alone or beside others, whether that is tied to the input embedding or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from actors.models.adapter import AdapterSpec
from actors.rollout.engine import EngineSpec
from actors.rollout.engines.torch.torch_engine import TorchEngine
from tests.actors.trainer.backends.test_adapter import published, scores_of, started, train
from tests.actors.trainer.backends.test_merging import TOKENS, log_probabilities, merge
from tests.contracts.test_rollout_engine_contract import ask, run
from tests.tiny_checkpoint import make_tiny_checkpoint

HEAD = AdapterSpec(rank=4, alpha=12.0, targets=("all-linear", "lm_head"))
HEAD_ALONE = AdapterSpec(rank=4, alpha=12.0, targets=("lm_head",))
pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer:UserWarning")


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model_path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), tied=request.param)


def loaded(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize(("adapter", "decoder"), [(HEAD, "fused"), (HEAD_ALONE, "generic")])
async def test_trainer_engine_peft_and_the_merged_model_say_the_same(
    model_path: Path, tmp_path: Path, adapter: AdapterSpec, decoder: str
) -> None:
    peft = pytest.importorskip("peft")
    backend, engine = await started(model_path, adapter=adapter), TorchEngine()
    first = await scores_of(backend, TOKENS)
    await train(backend)
    trained = await scores_of(backend, TOKENS)
    assert np.abs(trained - first).max() > 0.05
    manifest, tensors = await published(backend, tmp_path / "segment")
    options = {"decoder": decoder}
    await engine.start(EngineSpec(model_path=model_path, adapter=adapter, max_context_tokens=64, options=options))
    for version in (3, 4):  # the second load begins from the same weights as the first
        await engine.load_weights(tensors, {e.name: e.dtype for e in manifest.tensors}, version, in_flight="recompute")
        sample = (await run(engine, ask(0, max_tokens=12)))[0]
        np.testing.assert_allclose(sample.logprobs, await scores_of(backend, sample.tokens), atol=1e-5)
    await backend.export_checkpoint(tmp_path / "adapter")
    with_peft = peft.PeftModel.from_pretrained(loaded(model_path), tmp_path / "adapter")
    np.testing.assert_allclose(log_probabilities(with_peft), trained, atol=1e-5)
    result = merge(tmp_path / "adapter", tmp_path / "merged")
    assert result.exit_code == 0, result.output
    whole, base = loaded(tmp_path / "merged"), loaded(model_path)
    np.testing.assert_allclose(log_probabilities(whole), trained, atol=1e-5)
    assert whole.get_input_embeddings().weight.equal(base.get_input_embeddings().weight)
    await engine.close()
    await backend.close()


async def test_training_goes_on_bit_for_bit_and_the_reference_is_the_model_itself(
    model_path: Path, tmp_path: Path
) -> None:
    first = await started(model_path, adapter=HEAD, needs_reference=True)
    untrained = await scores_of(first, TOKENS)
    await train(first, 2)
    await first.save(tmp_path / "stored")
    second = await started(model_path, adapter=HEAD, needs_reference=True, seed=5)
    await second.load(tmp_path / "stored")
    for backend in (first, second):
        await train(backend, 2)
        assert np.array_equal(await scores_of(backend, TOKENS, reference=True), untrained)
    tensors, others = [(await published(b, tmp_path / str(n)))[1] for n, b in enumerate((first, second))]
    assert any("lm_head" in name for name in tensors)
    assert all(np.array_equal(tensor, others[name]) for name, tensor in tensors.items())
    await first.close()
    await second.close()


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
async def test_files_name_what_peft_itself_names_for_the_same_targets(model_path: Path, tmp_path: Path) -> None:
    """Left to itself, PEFT also writes the weight of the head that it found."""
    peft = pytest.importorskip("peft")
    backend = await started(model_path, adapter=HEAD)
    await backend.export_checkpoint(tmp_path / "ours")
    await backend.close()
    said = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert {"lm_head", "q_proj", "down_proj"} < set(said["target_modules"]) and len(said["target_modules"]) == 8
    config = peft.LoraConfig(r=4, lora_alpha=12.0, target_modules=said["target_modules"], task_type="CAUSAL_LM")
    peft.get_peft_model(loaded(model_path), config).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    theirs.pop("base_model.model.lm_head.base_layer.weight")
    assert {name: tensor.shape for name, tensor in ours.items()} == {n: tensor.shape for n, tensor in theirs.items()}
    written = json.loads((tmp_path / "theirs" / "adapter_config.json").read_text())
    written["target_modules"] = sorted(written["target_modules"])
    assert said == {key: written[key] for key in said}
