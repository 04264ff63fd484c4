"""Long packed rows: when they are chosen, what they compute, and what the trainer keeps of them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.trainer.backend import BackendSpec, LossSpec, MicroBatch
from actors.trainer.backends.torch import causal_lm
from actors.trainer.backends.torch.attention.blocks import keys_computed, query_blocks
from actors.trainer.backends.torch.causal_lm import ResponseLogits, load_model, response_positions
from actors.trainer.backends.torch.packing import Layout, choose, packed, plan_blocks
from actors.trainer.backends.torch.torch_backend import TorchBackend
from actors.trainer.learning.samples import pad
from benchmarks.gpu._long_row import group, group_of
from tests.actors.trainer.random_samples import random_samples
from tests.tiny_checkpoint import make_tiny_checkpoint


def chosen(batch: MicroBatch, hidden: int = 64, *, long_rows: bool = True) -> Layout:
    return choose(batch, response_positions(batch), hidden=hidden, may_pack=True, long_rows=long_rows)


@pytest.mark.parametrize(
    ("groups", "hidden", "is_one_row"),
    [
        ([(900, [300] * 8)], 64, True),  # longer than a row under a dense mask may be
        ([(40, [300]), (40, [700]), (300, [80])], 256, True),  # documents of uneven lengths: nothing is padding
        ([(20, [8] * 8)] * 4, 64, False),  # short rows under one mask have fewer calls
        ([(700, [500])], 64, False),  # one sequence is causal by itself
        ([(4, [900] * 3)], 64, False),  # nothing shared, equal lengths
    ],
)
def test_one_row_of_everything_is_chosen_where_it_is_cheaper(
    groups: list[tuple[int, list[int]]], hidden: int, is_one_row: bool
) -> None:
    layout = chosen(pad(random_samples(groups)), hidden)
    assert (layout.ends is not None and layout.input_ids.shape[0] == 1) == is_one_row


def test_a_group_of_sixteen_thousand_tokens_is_computed_once() -> None:
    """Keys that are computed are those of each path and at most a block more, not the square of the row."""
    batch, distinct = group_of("each", 16_384)
    layout = chosen(batch)
    assert layout.ends is not None
    assert layout.input_ids.size == distinct == 44_536
    assert layout.position_ids is not None
    seen = int((layout.position_ids + 1).sum())
    assert seen < keys_computed(query_blocks(layout.ends[0])) < 1.1 * seen < 0.3 * distinct**2


def test_without_blocks_a_long_group_is_split_as_before() -> None:
    batch, _ = group(1000, 900, 10)
    assert chosen(batch, long_rows=False).input_ids.shape[1] <= 2048


@pytest.mark.parametrize("checkpointed", [False, True])
async def test_no_mask_of_the_rows_square_is_kept(
    tmp_path: Path, checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that is saved for the backward pass grows with the square of the row."""
    batch, distinct = group(600, 300, 16)
    saved: list[int] = []

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    rows: list[Layout] = []

    def recorded(*args: Any, **kwargs: Any) -> Layout:
        rows.append(choose(*args, **kwargs))
        return rows[-1]

    monkeypatch.setattr(causal_lm, "choose", recorded)
    path = make_tiny_checkpoint(tmp_path)
    model = load_model(path, BackendSpec(model_path=path, recompute="whole" if checkpointed else "none"))
    source = ResponseLogits(model, "cpu")
    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        source(batch, response_positions(batch)).logprobs(1.0)[0].sum().backward()  # type: ignore[no-untyped-call]
    assert rows[-1].input_ids.shape == (1, distinct)
    assert max(saved) <= distinct * 200, "hidden states, and logits of a vocabulary of 100"


async def test_gradients_are_the_same_with_layers_that_are_recomputed(tmp_path: Path) -> None:
    batch, _ = group(300, 330, 16)
    path = make_tiny_checkpoint(tmp_path)
    gradients: list[torch.Tensor] = []
    for flag in (False, True):
        backend = TorchBackend()
        await backend.start(BackendSpec(model_path=path, recompute="whole" if flag else "none"))
        await backend.accumulate(batch, LossSpec())
        assert backend._core is not None
        gradients.append(backend._core.policy.parameters.grad.clone())
        await backend.close()
    assert torch.equal(*gradients)


def test_models_in_several_threads_keep_their_trees_apart(tmp_path: Path) -> None:
    """Each thread has a row of its own, again and again, and the tree of none reaches another."""
    path = make_tiny_checkpoint(tmp_path)
    batches = [pad(random_samples([(200 + 50 * n, [300, 200 + 90 * n])], n)) for n in range(3)]
    sources = [ResponseLogits(load_model(path, BackendSpec(model_path=path)), "cpu") for _ in batches]
    layouts = [packed(batch, response_positions(batch), [tuple(plan_blocks(batch))]) for batch in batches]
    with torch.no_grad():
        wanted = [source.forward(layout) for source, layout in zip(sources, layouts, strict=True)]
    found: list[list[torch.Tensor]] = [[] for _ in batches]

    def compute(index: int) -> None:
        with torch.no_grad():
            found[index] = [sources[index].forward(layouts[index]) for _ in range(5)]

    threads = [threading.Thread(target=compute, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for one, several in zip(wanted, found, strict=True):
        assert len(several) == 5
        for other in several:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_siblings_are_sorted_as_numbers_are() -> None:
    """The order decides what neighbours share; ids above 255 have several bytes."""
    batch, _ = group(3, 8, 2)
    ids = batch.input_ids.copy()
    ids[:, 3:] += np.array([0, 300, 70_000, 5, 256, 255, 0, 65_536], np.int32)[:, None]
    changed = MicroBatch(
        input_ids=ids, lengths=batch.lengths, prompt_lengths=batch.prompt_lengths, loss_weight=batch.loss_weight,
        behaviour_logprobs=batch.behaviour_logprobs, advantages=batch.advantages,
    )  # fmt: skip
    (block,) = plan_blocks(changed)
    assert list(block.members) == sorted(range(8), key=lambda member: ids[member, 3:-1].tolist())
