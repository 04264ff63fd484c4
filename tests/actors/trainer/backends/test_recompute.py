"""Gradient checkpointing leaves the policy alone, whatever noise a model has for training."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from actors.trainer.backend import BackendSpec
from actors.trainer.backends.torch.causal_lm import ResponseLogits, load_model, response_positions
from actors.trainer.backends.torch.recompute import recompute_layers
from actors.trainer.batching import pad
from actors.trainer.errors import ModelNotLoadable
from benchmarks._model_family import make_model
from benchmarks.model_families import FAMILIES
from tests.actors.trainer.random_samples import random_sample

NOISY = ("gpt2", "opt", "starcoder2", "mixtral", "bloom")
"""Dropout as modules and as functions, layers left out, noise in a router."""


def logprobs(model: Any) -> torch.Tensor:
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 90, 4).astype(np.int32)
    batch = pad([random_sample(rng, 0, sibling, prompt, 9) for sibling in range(3)])
    return ResponseLogits(model, "cpu")(batch, response_positions(batch)).logprobs(1.0)[0]


@pytest.mark.parametrize("family", NOISY)
def test_what_is_trained_is_what_is_scored_bit_for_bit(tmp_path: Path, family: str) -> None:
    make_model(family, {**FAMILIES[family], "vocab_size": 100}, tmp_path)
    plain = load_model(tmp_path, BackendSpec(model_path=tmp_path))
    model = load_model(tmp_path, BackendSpec(model_path=tmp_path, gradient_checkpointing=True))
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
    model: Any = load_model(tmp_path, BackendSpec(model_path=tmp_path, gradient_checkpointing=True))
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
    with pytest.raises(ModelNotLoadable, match=r"trainer\.gradient_checkpointing: Linear has no layers.*unset it"):
        recompute_layers(nn.Linear(2, 2))
