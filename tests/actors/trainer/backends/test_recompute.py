"""Every way of recomputation leaves the policy alone, whatever noise a model has for training, and its gradients."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode

from actors.models.adapter import AdapterSpec
from actors.trainer.backend import BackendSpec, CriticSpec, LossSpec
from actors.trainer.backends.torch import recompute
from actors.trainer.backends.torch.causal_lm import ResponseLogits, load_model, response_positions
from actors.trainer.backends.torch.recompute import recompute_layers, use_way
from actors.trainer.backends.torch.torch_backend import TorchBackend
from actors.trainer.errors import ModelNotLoadable
from actors.trainer.learning.samples import pad
from actors.trainer.measured_size import made_up
from benchmarks.gpu._long_row import group
from benchmarks.gpu._model_family import make_model
from benchmarks.gpu.model_families import FAMILIES
from configs.schema import RECOMPUTE_WAYS
from tests.actors.trainer.random_samples import random_sample
from tests.tiny_checkpoint import make_tiny_checkpoint

NOISY = ("gpt2", "opt", "starcoder2", "mixtral", "bloom")
"""Dropout as modules and as functions, layers left out, noise in a router."""


def logprobs(model: Any) -> torch.Tensor:
    return logprobs_by(ResponseLogits(model, "cpu"))


def logprobs_by(source: ResponseLogits) -> torch.Tensor:
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 90, 4).astype(np.int32)
    batch = pad([random_sample(rng, 0, sibling, prompt, 9) for sibling in range(3)])
    return source(batch, response_positions(batch)).logprobs(1.0)[0]


@pytest.mark.parametrize(
    ("family", "way"), [*((family, "whole") for family in NOISY), ("mixtral", "selective"), ("mixtral", "offload")]
)
def test_what_is_trained_is_what_is_scored_bit_for_bit(tmp_path: Path, family: str, way: str) -> None:
    make_model(family, {**FAMILIES[family], "vocab_size": 100}, tmp_path)
    plain = load_model(tmp_path, BackendSpec(model_path=tmp_path))
    model = load_model(tmp_path, BackendSpec(model_path=tmp_path, recompute=way))
    with torch.no_grad():
        wanted = logprobs(plain)
    trained = logprobs(model)
    assert torch.equal(trained.detach(), wanted)
    trained.sum().backward()
    logprobs(plain).sum().backward()
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)
    assert not any(module.training for module in model.modules())


def test_layers_are_computed_again_in_the_backward_pass_and_only_there(tmp_path: Path) -> None:
    make_model("llama", {"vocab_size": 100}, tmp_path)
    model: Any = load_model(tmp_path, BackendSpec(model_path=tmp_path, recompute="whole"))
    calls: Counter[str] = Counter()
    for number, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, n=number: calls.update([f"layer {n}"]))
    with torch.no_grad():
        logprobs(model)
    before = dict(calls)
    result = logprobs(model)
    calls.clear()
    result.sum().backward()
    assert before.keys() == {"layer 0", "layer 1"}
    assert calls == {"layer 0": 1, "layer 1": 1}


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(ModelNotLoadable, match=r"trainer\.recompute: Linear has no layers.*unset it"):
        recompute_layers(nn.Linear(2, 2), "whole")


CLIPPED: dict[str, Any] = {"clip_qkv": 0.05}


@pytest.mark.parametrize(("family", "more", "by"), [("olmo", CLIPPED, "clamp_"), ("gpt_oss", {}, "add_")])
def test_selective_is_not_for_models_that_change_in_place_what_it_keeps(
    tmp_path: Path, family: str, more: dict[str, Any], by: str
) -> None:
    """The second pass would begin with what the first has changed: clamped values let gradients through."""
    make_model(family, {**FAMILIES.get(family, {}), "vocab_size": 100, **more}, tmp_path)
    selective = load_model(tmp_path, BackendSpec(model_path=tmp_path, recompute="selective"))
    with pytest.raises(ModelNotLoadable, match=rf"trainer\.recompute: .* changes by aten\.{by}.* Set it to whole"):
        ResponseLogits(selective, "cpu")
    model = load_model(tmp_path, BackendSpec(model_path=tmp_path, recompute="auto"))
    with pytest.warns(UserWarning, match="auto does whole in place of selective"):
        source = ResponseLogits(model, "cpu")
    use_way(model, "selective")
    logprobs_by(source).sum().backward()
    plain = load_model(tmp_path, BackendSpec(model_path=tmp_path))
    logprobs(plain).sum().backward()
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


KINDS: dict[str, dict[str, Any]] = {
    "a tree in one short row": {"batch": group(20, 16, 4)[0]},
    "a long row in blocks": {"batch": group(600, 200, 16)[0]},
    "an adapter": {"batch": group(20, 16, 4)[0], "adapter": AdapterSpec(rank=2, alpha=4.0)},
    "a critic": {"batch": group(20, 16, 4)[0], "critic": True},
}


@pytest.mark.parametrize("kind", KINDS)
async def test_gradients_are_the_same_bits_in_every_way(tmp_path: Path, kind: str) -> None:
    path = make_tiny_checkpoint(tmp_path)
    how = dict(KINDS[kind])
    batch = how.pop("batch")
    if how.get("critic"):
        zeros = np.zeros(batch.input_ids.shape, np.float32)
        how["critic"] = CriticSpec(model_path=path)
        batch = dataclasses.replace(batch, old_values=zeros, returns=zeros + 1)
    found: dict[str, list[torch.Tensor]] = {}
    for way in ("none", "selective", "whole"):
        backend = TorchBackend()
        await backend.start(BackendSpec(model_path=path, recompute=way, **how))
        await backend.accumulate(batch, LossSpec())
        assert backend._core is not None
        found[way] = [model.parameters.grad.clone() for model in backend._core._models.values()]
        await backend.close()
    assert all(grad.any() for grad in found["none"])
    for way in ("selective", "whole"):
        assert all(map(torch.equal, found["none"], found[way])), way


class Counting(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def test_selective_multiplies_no_matrix_and_attends_nowhere_twice_and_auto_may_change_between_passes(
    tmp_path: Path,
) -> None:
    make_model("llama", {"vocab_size": 100}, tmp_path)
    model = load_model(tmp_path, BackendSpec(model_path=tmp_path, recompute="auto"))
    products, other = dict[str, int](), dict[str, int]()
    for way in ("none", "selective", "whole"):
        use_way(model, way)
        with Counting() as counted:
            result = logprobs(model).sum()
        forward = counted.calls
        assert forward["aten.mm"] >= 14
        with Counting() as counted:
            result.backward()
        products[way] = counted.calls["aten.mm"] + counted.calls["aten._scaled_dot_product_flash_attention_for_cpu"]
        other[way] = counted.calls["aten.silu"]
    assert products["selective"] == products["none"] < products["whole"]
    assert other == {"none": 0, "selective": 2, "whole": 2}


def test_offload_moves_activations_and_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[torch.Tensor] = []

    class Noted(save_on_cpu):
        def __init__(self, *, pin_memory: bool) -> None:
            super().__init__(pin_memory=pin_memory)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: (moved.append(tensor), pack(tensor))[1]

    monkeypatch.setattr(recompute, "save_on_cpu", Noted)
    make_model("llama", {"vocab_size": 100}, tmp_path)
    model = load_model(tmp_path, BackendSpec(model_path=tmp_path, recompute="offload"))
    logprobs(model).sum().backward()
    weights = {own.untyped_storage().data_ptr() for own in model.parameters()}
    assert moved
    assert not [tensor for tensor in moved if tensor.untyped_storage().data_ptr() in weights]


@pytest.mark.gpu
async def test_on_a_device_gradients_are_the_same_in_every_way_and_each_takes_less_than_to_keep_all(
    tmp_path: Path,
) -> None:
    path = make_tiny_checkpoint(tmp_path, hidden=128, layers=4)
    backend = TorchBackend()
    await backend.start(BackendSpec(model_path=path, device="cuda", recompute="auto"))
    assert backend._core is not None
    grads, peaks = dict[str, torch.Tensor](), dict[str, int]()
    for way in RECOMPUTE_WAYS:
        await backend.use_recompute(way)
        peaks[way] = (await backend.measure(made_up(16, 512), LossSpec())).peak_bytes
        await backend.accumulate(made_up(4, 64), LossSpec())
        grads[way] = backend._core.policy.parameters.grad.clone()
        await backend.drop_sums()
    await backend.close()
    for way in RECOMPUTE_WAYS[1:]:
        torch.testing.assert_close(grads[way], grads["none"], msg=way)
        assert peaks[way] < peaks["none"], way
