"""Targets that are not the next inputs, in every layout and on every kind of replica, against a plain model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.protocol.datums import Datum
from actors.trainer.backend import BackendSpec, MicroBatch
from actors.trainer.backends.torch.causal_lm import response_positions
from actors.trainer.backends.torch.packing import choose
from actors.trainer.backends.torch.torch_backend import TorchBackend
from actors.trainer.learning.datum_batches import cut_datums, explicit_loss
from actors.trainer.learning.token_logprobs import TokenLogprobs
from tests.tiny_checkpoint import make_tiny_checkpoint


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), max_position=1024)


def batch_of(sizes: list[int], targets: int) -> tuple[list[Datum], MicroBatch]:
    """Datums that share half of the shortest one, with ``targets`` at each position, in one micro-batch."""
    rng = np.random.default_rng(0)
    stem = rng.integers(3, 99, min(sizes) // 2 + 1)
    made = list[Datum]()
    for size in sizes:
        tokens = np.concatenate([stem, rng.integers(3, 99, size - stem.size)]).astype(np.int32)
        shape = (size, targets)
        weights = rng.normal(size=shape).astype(np.float32) * (rng.random(shape) < 0.8)
        made.append(Datum(tokens, rng.integers(3, 99, shape).astype(np.int32), {"weights": weights}))
    [part] = cut_datums(made, "cross_entropy", budget_tokens=10**9)
    return made, part.batch


def plain(model: Any, batch: MicroBatch) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Log-probabilities and gradients of the rows of ``batch`` one after the other."""
    assert batch.targets is not None
    logprobs = np.zeros(batch.input_ids.shape, np.float32)
    for row, length in enumerate(batch.lengths.tolist()):
        ids = torch.from_numpy(batch.input_ids[row, : length - 1].astype(np.int64))
        targets = torch.from_numpy(batch.targets[row, 1:length].astype(np.int64))
        new = model(input_ids=ids[None]).logits[0].log_softmax(-1).gather(1, targets[:, None])[:, 0]
        (-new * torch.from_numpy(batch.loss_weight[row, 1:length])).sum().backward()
        logprobs[row, 1:length] = new.detach().numpy()
    return logprobs, {name: own.grad for name, own in model.named_parameters()}


def pad_all(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    for member in members(backend):
        member.logits.may_pack = False


def whole_logits(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    for member in members(backend):
        head = member.logits.blocked_head
        assert head is not None
        head.by_blocks = False
        head._head.forward, head._model.forward = head._own_head, head._own_model


def small_blocks(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head computes a few rows at a time, and keeps none of them."""
    monkeypatch.setattr(TokenLogprobs, "BLOCK_BYTES", 4 * 100 * 7)
    monkeypatch.setattr(TokenLogprobs, "KEPT_ELEMENTS", 0)


def as_it_is(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    pass


def members(backend: TorchBackend) -> list[Any]:
    assert backend._core is not None
    return backend._core.policy.replicas.members


LONG = [600, 560, 300]
"""Longer than a block of query rows: one row holds all of them, and attention is computed in blocks."""


@pytest.mark.parametrize(
    ("sizes", "way", "replicas"),
    [([9, 8, 3], pad_all, 1), ([9, 8, 3], as_it_is, 2), ([9, 8, 3], whole_logits, 1), (LONG, small_blocks, 1)],
)
async def test_targets_are_learned_alike_in_every_layout(
    model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sizes: list[int],
    way: Callable[[TorchBackend, pytest.MonkeyPatch], None],
    replicas: int,
) -> None:
    from transformers import AutoModelForCausalLM

    _, batch = batch_of(sizes, targets=3)
    layout = choose(batch, response_positions(batch), hidden=32, may_pack=True, long_rows=True)
    assert layout.ends is not None
    assert layout.input_ids.size < 1.5 * sum(sizes), "the rows of one datum are computed once"
    backend = TorchBackend()
    await backend.start(BackendSpec(model_path=model_path, threads=replicas, replicas=replicas))
    way(backend, monkeypatch)
    learned = await backend.learn(batch, explicit_loss("cross_entropy", {}))
    logprobs, gradients = plain(AutoModelForCausalLM.from_pretrained(model_path), batch)
    np.testing.assert_allclose(learned.logprobs, logprobs, atol=1e-3)
    core = backend._core
    assert core is not None
    core.policy.parameters.gather_gradients()
    for name, own in members(backend)[0].logits.model.named_parameters():
        scale = float(gradients[name].abs().max())
        torch.testing.assert_close(own.grad, gradients[name], rtol=1e-3, atol=1e-4 * max(scale, 1.0))
    await backend.close()
