"""Packed rows compute once what siblings share, and change nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.trainer.backend import BackendSpec, LossSpec, MicroBatch
from actors.trainer.backends.torch import packing
from actors.trainer.backends.torch.causal_lm import ResponseLogits, load_model, response_positions
from actors.trainer.backends.torch.packing import Row, choose, packed, padded, plan_blocks, plan_rows
from actors.trainer.backends.torch.torch_backend import TorchBackend
from actors.trainer.learning.samples import TrainSample, pad
from tests.actors.trainer.random_samples import random_samples
from tests.tiny_checkpoint import make_tiny_checkpoint


def batch_of(groups: list[tuple[int, list[int]]], seed: int = 0, *, vocabulary: int = 96) -> MicroBatch:
    """Groups as (prompt tokens, response tokens of each sibling). A small vocabulary makes siblings alike."""
    return pad(random_samples(groups, seed, vocabulary=vocabulary))


EXAMPLE = [(6, [3, 1, 4]), (2, [5]), (4, [1, 1])]


def one_a_row(batch: MicroBatch) -> list[Row]:
    return [(block,) for block in plan_blocks(batch)]


def all_in_one_row(batch: MicroBatch) -> list[Row]:
    return [tuple(plan_blocks(batch))]


def test_siblings_share_one_block_and_the_last_tokens_are_left_out() -> None:
    batch = batch_of(EXAMPLE)
    blocks = plan_blocks(batch)
    assert [
        (block.prompt_tokens, sorted(zip(block.members, block.response_tokens, strict=True))) for block in blocks
    ] == [
        (6, [(0, 2), (1, 0), (2, 3)]),
        (2, [(3, 4)]),
        (4, [(4, 0), (5, 0)]),
    ]
    assert [block.length for block in blocks] == [11, 6, 4]


def written(responses: list[list[int]], prompt: tuple[int, ...] = (50, 51)) -> MicroBatch:
    """One group whose siblings say exactly this."""
    return pad(
        [
            TrainSample(
                prompt=0,
                sibling=sibling,
                prompt_ids=np.array(prompt, np.int32),
                tokens=np.array(tokens, np.int32),
                logprobs=np.full(len(tokens), -1.0, np.float32),
                stale=np.zeros(len(tokens), np.bool_),
                advantage=1.0,
            )
            for sibling, tokens in enumerate(responses)
        ]
    )


def test_siblings_that_begin_alike_share_what_they_have_in_common() -> None:
    batch = written([[7, 8, 9, 1], [7, 8, 4, 5, 1], [7, 8, 9, 2], [6, 1]])
    (block,) = plan_blocks(batch)
    assert block.length == 2 + len([6, 7, 8, 4, 5, 9])
    layout = packed(batch, response_positions(batch), [(block,)])
    assert layout.input_ids.tolist() == [[50, 51, 6, 7, 8, 4, 5, 9]]
    assert layout.position_ids is not None and layout.position_ids.tolist() == [[0, 1, 2, 2, 3, 4, 5, 4]]
    assert layout.rows[layout.row_of].tolist() == [1, 3, 4, 7, 1, 3, 4, 5, 6, 1, 3, 4, 7, 1, 2]
    assert layout.rows.size == 7, "the output embedding sees a position once, whoever asks for it"
    assert layout.mask[0, 0].astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 1, 1, 0, 0],
        [1, 1, 0, 1, 1, 1, 1, 0],
        [1, 1, 0, 1, 1, 0, 0, 1],  # the branch goes on from 7 8 and sees nothing of 4 5
    ]


@settings(max_examples=200)
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 4), st.lists(st.integers(1, 7), min_size=1, max_size=6)), min_size=1, max_size=4
    ),
    seed=st.integers(0, 1000),
    rows=st.integers(1, 3),
    row_tokens_max=st.sampled_from([8, 2048]),
)
def test_every_token_is_predicted_from_exactly_the_tokens_before_it(
    groups: list[tuple[int, list[int]]], seed: int, rows: int, row_tokens_max: int
) -> None:
    batch = batch_of(groups, seed, vocabulary=2)
    where = response_positions(batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "ROW_TOKENS_MAX", row_tokens_max)
        blocks = plan_blocks(batch)
    layout = packed(batch, where, [tuple(blocks[r::rows]) for r in range(min(rows, len(blocks)))])
    assert layout.position_ids is not None
    mask = layout.mask
    assert mask[:, 0].diagonal(axis1=1, axis2=2).all(), "a position that sees nothing would be NaN"
    width = layout.input_ids.shape[1]
    for (member, t), place in zip(np.argwhere(where), layout.rows[layout.row_of], strict=True):
        r, i = divmod(int(place), width)
        seen = np.flatnonzero(mask[r, 0, i])
        assert layout.input_ids[r, seen].tolist() == batch.input_ids[member, :t].tolist()
        assert layout.position_ids[r, seen].tolist() == list(range(t))


def test_a_packed_row_goes_on_from_the_prompt_in_every_response() -> None:
    batch = written([[7, 8, 1], [9, 1]])
    layout = packed(batch, response_positions(batch), one_a_row(batch))
    assert layout.input_ids.tolist() == [[50, 51, 7, 8, 9]]
    assert layout.position_ids is not None and layout.position_ids.tolist() == [[0, 1, 2, 3, 2]]
    assert layout.rows[layout.row_of].tolist() == [1, 2, 3, 1, 4]
    assert layout.mask[0, 0].astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],  # the second response sees the prompt and itself, never the first response
    ]


def test_groups_in_one_row_begin_at_position_0_each_and_see_nothing_of_each_other() -> None:
    batch = batch_of([(1, [2, 3]), (2, [2])], seed=1)
    assert batch.input_ids[0, 1] < batch.input_ids[1, 1], "the first sibling comes first in the row"
    layout = packed(batch, response_positions(batch), all_in_one_row(batch))
    a, b, c = batch.input_ids
    assert layout.input_ids.tolist() == [[a[0], a[1], b[1], b[2], c[0], c[1], c[2]]]
    assert layout.position_ids is not None and layout.position_ids.tolist() == [[0, 1, 1, 2, 0, 1, 2]]
    assert layout.rows[layout.row_of].tolist() == [0, 1, 0, 2, 3, 5, 6]
    assert layout.mask[0, 0].astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [1, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0],  # the second prompt
        [0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 1, 1],
    ]


def test_groups_of_uneven_length_are_laid_into_rows_of_even_length() -> None:
    batch = batch_of([(8, [90] * 4), (8, [10] * 4), (8, [60] * 4), (8, [40] * 4)], vocabulary=100_000)
    blocks = plan_blocks(batch)
    rows = plan_rows(blocks, hidden=4096)
    lengths = [sum(block.length for block in row) for row in rows]
    assert sorted(id(block) for row in rows for block in row) == sorted(id(block) for block in blocks)
    assert len(rows) == 2 and max(lengths) - min(lengths) == 0


def test_rows_stay_within_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "ROW_TOKENS_MAX", 12)
    responses = [[32, 1, 1, 1, 1], [81, 1, 1, 1, 1], [56, 1, 1, 1, 1], [3] * 30]
    blocks = plan_blocks(written(responses, prompt=(50, 51, 52, 53)))
    assert sorted(sorted(block.members) for block in blocks) == [[0, 2], [1], [3]], "in the order of their tokens"
    rows = plan_rows(blocks, hidden=4096)
    assert max(sum(block.length for block in row) for row in rows) == 33, "a block longer than a row sets the width"
    blocks = plan_blocks(batch_of([(4, [3]), (4, [2])]))
    assert [block.members for block in blocks] == [(0,), (1,)], "groups are blocks apart"


@pytest.mark.parametrize(
    ("groups", "is_packed"),
    [
        ([(20, [8] * 8)] * 4, True),
        ([(20, [8])] * 4, False),  # nothing to share
        ([(4, [400] * 4)], False),  # attention over the long row would cost more than the prompts
        ([(500, [100] * 8)], True),
    ],
)
def test_the_cheaper_layout_is_chosen(groups: list[tuple[int, list[int]]], is_packed: bool) -> None:
    batch = batch_of(groups)
    layout = choose(batch, response_positions(batch), hidden=64, may_pack=True)
    assert (layout.ends is not None) == is_packed
    assert choose(batch, response_positions(batch), hidden=64, may_pack=False).ends is None


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama", "gpt2", "gpt_neox", "opt"])
def test_both_layouts_give_the_same_log_probabilities(tmp_path: Path, architecture: str) -> None:
    model = load_model(
        make_tiny_checkpoint(tmp_path, architecture=architecture), BackendSpec(model_path=tmp_path, threads=1)
    )
    source = ResponseLogits(model, "cpu")
    assert source.may_pack, "the probe must accept an architecture that obeys masks"
    batch = batch_of(EXAMPLE, vocabulary=2)
    where = response_positions(batch)
    with torch.no_grad():
        one = source.forward(padded(batch, where))
        for plan in (one_a_row(batch), all_in_one_row(batch)):
            layout = packed(batch, where, plan)
            assert layout.rows.size < len(one), "siblings share at least the position of their first token"
            shared = source.forward(layout)[torch.from_numpy(layout.row_of)]
            torch.testing.assert_close(one, shared, rtol=1e-4, atol=1e-4)


async def test_both_layouts_give_the_same_gradients(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path)
    batch = batch_of([(9, [2, 3, 4, 1]), (7, [2, 2]), (5, [6, 6, 5])], vocabulary=2)
    gradients: list[torch.Tensor] = []
    for may_pack in (True, False):
        backend = TorchBackend()
        await backend.start(BackendSpec(model_path=path, threads=1))
        assert backend._core is not None
        backend._core.policy.replicas.members[0].logits.may_pack = may_pack
        await backend.accumulate(batch, LossSpec())
        gradients.append(backend._core.policy.parameters.grad.clone())
        await backend.close()
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=2e-5)


def test_a_model_that_ignores_the_mask_is_found_out(tmp_path: Path) -> None:
    """As ALiBi or recurrent models do: the probe sees that packed rows give other logits."""
    model = load_model(make_tiny_checkpoint(tmp_path), BackendSpec(model_path=tmp_path, threads=1))
    original = model.forward

    def forgetful(*args: object, attention_mask: object = None, **kwargs: object) -> object:
        return original(*args, **kwargs)

    model.forward = forgetful  # type: ignore[method-assign]
    assert not ResponseLogits(model, "cpu").may_pack


def test_a_model_that_takes_no_positions_is_found_out(tmp_path: Path) -> None:
    model = load_model(make_tiny_checkpoint(tmp_path), BackendSpec(model_path=tmp_path, threads=1))
    original = model.forward

    def positionless(input_ids: object, use_cache: bool, attention_mask: object = None) -> object:
        return original(input_ids=input_ids, use_cache=use_cache, attention_mask=attention_mask)

    model.forward = positionless  # type: ignore[method-assign]
    assert not ResponseLogits(model, "cpu").may_pack
