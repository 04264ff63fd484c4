"""A frozen model in 4 bits: nothing is lost of what was rounded, and the trainer computes as with the rounded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.models.adapted_layers import linear_layers
from actors.models.adapter import AdapterSpec
from actors.rollout.engine import EngineSpec
from actors.rollout.engines.torch.torch_engine import TorchEngine
from actors.trainer.backends.torch.layers.four_bits import Packed, pack_linears
from actors.trainer.errors import CheckpointCorrupt, ModelNotLoadable
from supervisors.preparation.rounded_model import make
from tests.actors.trainer.backends.test_adapter import published, scores_of, started, train
from tests.contracts.test_rollout_engine_contract import ask, run
from tests.tiny_checkpoint import make_tiny_checkpoint

PLAIN = AdapterSpec(rank=4, alpha=8.0)
NF4 = AdapterSpec(rank=4, alpha=8.0, quantization="nf4")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def rounded(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rounded") / "model_nf4"
    assert make(whole, "float32", directory) == 2 * 7
    return directory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(64, 64), (3, 21), (1, 1), (7, 200), (40, 96)])
def test_rounding_what_was_rounded_changes_nothing(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    for matrix in (torch.randn(shape), torch.randn(shape) * 1e-4, torch.zeros(shape), torch.full(shape, -3.0)):
        once = Packed(matrix.to(dtype)).unpacked()
        assert once.shape == shape and once.dtype == dtype
        assert torch.equal(Packed(once).unpacked(), once)
        assert (once.float() - matrix).abs().max() <= 0.17 * matrix.abs().max() + 1e-6, "half of the widest gap"


def test_a_number_takes_four_bits_and_half_a_bit_for_its_share_of_a_scale() -> None:
    packed = Packed(torch.randn(256, 512, dtype=torch.bfloat16))
    assert packed.nbytes == 256 * 512 * 4.5 / 8
    held = packed.placeholder
    assert (held.shape, held.dtype, held.untyped_storage().nbytes()) == ((256, 512), torch.bfloat16, 2)


def test_the_copy_is_rounded_in_its_linear_layers_alone_and_is_a_whole_model(whole: Path, rounded: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before, after = (AutoModelForCausalLM.from_pretrained(path, dtype="float32") for path in (whole, rounded))
    layers = {f"{name}.weight" for name in linear_layers(after)}
    moved = {
        name
        for (name, one), (_, other) in zip(before.named_parameters(), after.named_parameters(), strict=True)
        if not torch.equal(one, other)
    }
    assert moved == layers
    assert AutoTokenizer.from_pretrained(rounded).get_vocab() == AutoTokenizer.from_pretrained(whole).get_vocab()


async def test_a_trainer_with_a_base_in_four_bits_does_what_it_does_with_the_rounded_model(
    whole: Path, rounded: Path, tmp_path: Path
) -> None:
    """Two replicas, a reference with the adapter switched off, recomputation; in two dtypes."""
    make(whole, "bfloat16", tmp_path / "bfloat16")
    for dtype, path in (("float32", rounded), ("bfloat16", tmp_path / "bfloat16")):
        results: list[dict[str, np.ndarray]] = []
        scores: list[np.ndarray] = []
        for spec in (PLAIN, NF4):
            backend = await started(
                path, adapter=spec, dtype=dtype, threads=2, replicas=2, needs_reference=True, recompute="whole"
            )
            await train(backend)
            results.append((await published(backend, tmp_path / spec.quantization))[1])
            scores.append(await scores_of(backend, [9, 8, 7], reference=True))
            await backend.close()
        for name, expected in results[0].items():
            np.testing.assert_array_equal(results[1][name], expected, name)
        np.testing.assert_array_equal(scores[1], scores[0])


async def test_engines_that_load_the_copy_sample_what_the_trainer_trains(rounded: Path, tmp_path: Path) -> None:
    backend = await started(rounded, adapter=NF4)
    await train(backend)
    manifest, tensors = await published(backend, tmp_path / "segment")
    engine = TorchEngine()
    await engine.start(EngineSpec(model_path=rounded, adapter=NF4, max_context_tokens=64))
    await engine.load_weights(tensors, {one.name: one.dtype for one in manifest.tensors}, 1, in_flight="recompute")
    sample = (await run(engine, ask(0, max_tokens=12)))[0]
    assert np.allclose(sample.logprobs, await scores_of(backend, sample.tokens), atol=1e-5)
    await engine.close()
    await backend.close()


async def test_a_model_that_was_not_rounded_is_refused(whole: Path) -> None:
    with pytest.raises(ModelNotLoadable, match=r"q_proj holds other numbers than nf4 has.*RUN_DIR/model_nf4"):
        await started(whole, adapter=NF4)


async def test_a_checkpoint_beside_a_model_in_four_bits_is_none_beside_a_whole_one(
    rounded: Path, tmp_path: Path
) -> None:
    backend = await started(rounded, adapter=NF4)
    await train(backend, 1)
    await backend.save(tmp_path / "checkpoint")
    await backend.close()
    again = await started(rounded, adapter=NF4)
    await again.load(tmp_path / "checkpoint")
    await again.close()
    other = await started(rounded, adapter=PLAIN)
    with pytest.raises(CheckpointCorrupt, match="beside a model in nf4"):
        await other.load(tmp_path / "checkpoint")
    await other.close()


def test_packing_leaves_no_weights_in_the_model(rounded: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(rounded, dtype="float32")
    layers = linear_layers(model)
    numbers = sum(layer.weight.numel() for layer in layers.values())
    packed = pack_linears(model, torch.float32, "cpu")
    assert packed.keys() == layers.keys()
    assert all(layer.weight.numel() == 0 for layer in layers.values())
    assert sum(one.nbytes for one in packed.values()) == numbers * 4.5 / 8


def test_transformers_quantises_the_model_itself_to_the_same_one(whole: Path, rounded: Path) -> None:
    """What PEFT's users do, ``load_in_4bit`` of the model as it was: the adapter may be used so, too."""
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(whole, dtype="float32", quantization_config=how, device_map="cpu")
    ours = AutoModelForCausalLM.from_pretrained(rounded, dtype="float32")
    for name, layer in linear_layers(ours).items():
        weight: Any = theirs.get_submodule(name).weight
        own = Packed(layer.weight.data)
        assert torch.equal(weight.data.flatten(), own._codes.flatten()), name
        assert torch.equal(weight.quant_state.absmax, own._state.absmax), name
