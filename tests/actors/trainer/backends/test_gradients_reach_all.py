"""Every parameter that is trained gets a gradient, whatever stands in for a model's own parts, and when it is sharded.

A part that keeps a parameter from when it was put in trains nothing once the model is sharded, and nobody is told.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from actors.models import matmul
from actors.trainer.backend import BackendSpec, CriticSpec
from actors.trainer.backends.torch.causal_lm import ResponseLogits, load_model, response_positions
from actors.trainer.backends.torch.critic import load_critic
from actors.trainer.learning.samples import pad
from tests.actors.trainer.random_samples import random_sample
from tests.tiny_checkpoint import make_tiny_checkpoint


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def own_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers are computed our own way, as on some processors they are."""
    monkeypatch.setattr(matmul, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(matmul, "LEAST_WEIGHTS", 1)


def without_gradient(model: Any) -> list[str]:
    """Names of the parameters that a backward pass from the log-probabilities of some samples does not reach."""
    rng = np.random.default_rng(0)
    batch = pad([random_sample(rng, 0, sibling, rng.integers(3, 90, 4).astype(np.int32), 9) for sibling in range(3)])
    predicted = ResponseLogits(model, "cpu")(batch, response_positions(batch))
    predicted.logprobs(1.0)[0].pow(2).sum().backward()  # type: ignore[no-untyped-call]
    return [name for name, own in model.named_parameters() if own.grad is None or not bool((own.grad != 0).any())]


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])
@pytest.mark.usefixtures("world_of_one", "own_matrices")
def test_every_parameter_of_a_sharded_model_gets_a_gradient(
    tmp_path: Path, architecture: str, recomputed: bool, compute: torch.dtype
) -> None:
    path = make_tiny_checkpoint(tmp_path, architecture=architecture)
    model: Any = load_model(path, BackendSpec(model_path=path, recompute="whole" if recomputed else "none"))
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for layer in getattr(model.base_model, "layers", None) or model.base_model.h:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    assert without_gradient(model) == []


@pytest.mark.usefixtures("world_of_one", "own_matrices")
def test_every_parameter_of_a_sharded_critic_gets_a_gradient(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path)
    model: Any = load_critic(BackendSpec(model_path=path), CriticSpec(model_path=path))
    logits = ResponseLogits(model, "cpu")
    model.head.open = True
    fully_shard(model, reshard_after_forward=True)
    rng = np.random.default_rng(0)
    batch = pad([random_sample(rng, 0, sibling, rng.integers(3, 90, 4).astype(np.int32), 9) for sibling in range(3)])
    logits(batch, response_positions(batch)).logits.pow(2).sum().backward()  # type: ignore[no-untyped-call]
    assert [name for name, own in model.named_parameters() if own.grad is None] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("own_matrices")
def test_every_parameter_of_a_whole_model_gets_a_gradient(tmp_path: Path, dtype: str) -> None:
    path = make_tiny_checkpoint(tmp_path)
    assert without_gradient(load_model(path, BackendSpec(model_path=path, dtype=dtype))) == []
