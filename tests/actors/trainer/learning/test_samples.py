"""Samples and micro-batches: what is cut together follows from the samples alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.protocol.groups import GroupGrant
from actors.trainer.errors import BadGrant
from actors.trainer.learning.rules import LearningRule
from actors.trainer.learning.samples import TrainSample, cut, group_samples
from configs.learning_schema import AlgorithmConfig
from tests.actors.trainer.test_batching import grant

GRPO = LearningRule(AlgorithmConfig(), 100)


def test_a_group_becomes_samples_with_their_own_tokens_and_advantages() -> None:
    samples = group_samples(grant(0, rewards=(1.0, 0.0), lengths=[2, 3]), GRPO, max_staleness=0)
    assert [s.tokens.tolist() for s in samples] == [[0, 1], [2, 3, 4]]
    assert [s.logprobs.tolist() for s in samples] == [[0.0, -1.0], [-2.0, -3.0, -4.0]]
    assert [s.advantage for s in samples] == pytest.approx([0.70710, -0.70710], abs=1e-4)


def test_tokens_of_an_older_version_are_marked_stale() -> None:
    group = grant(0, step=3, lengths=[2, 2], version=3)
    group.versions[:] = [2, 3, 3, 3]
    samples = group_samples(group, GRPO, max_staleness=1)
    assert [s.stale.tolist() for s in samples] == [[True, False], [False, False]]


def test_tokens_older_than_the_staleness_bound_are_refused() -> None:
    """The scheduler gives no work to workers that are too far behind; should it ever, nobody learns from that."""
    group = grant(0, step=3, lengths=[2, 2], version=3)
    group.versions[:] = [1, 3, 3, 3]
    assert len(group_samples(group, GRPO, max_staleness=2)) == 2
    with pytest.raises(BadGrant, match=r"step 3, prompt 0: versions has 1, expected 1 fewer .*sync.max_staleness"):
        group_samples(group, GRPO, max_staleness=1)


@pytest.mark.parametrize("field", ["lengths", "rewards", "tokens", "logprobs", "versions", "prompt_ids"])
def test_columns_that_do_not_fit_together_are_refused_by_name(field: str) -> None:
    group = grant(0)
    broken = {name: getattr(group, name) for name in group.__struct_fields__}
    broken[field] = broken[field][:0] if field == "prompt_ids" else broken[field][:-1]
    with pytest.raises(BadGrant, match=r"tokens|" + field):
        group_samples(GroupGrant(**broken), GRPO, max_staleness=0)


def sample(prompt: int, sibling: int, *, p: int = 3, r: int = 4, advantage: float = 1.0) -> TrainSample:
    return TrainSample(
        prompt=prompt, sibling=sibling, prompt_ids=np.arange(1, p + 1, dtype=np.int32), advantage=advantage,
        tokens=np.arange(20, 20 + r, dtype=np.int32), logprobs=np.full(r, -1, np.float32), stale=np.zeros(r, np.bool_),
    )  # fmt: skip


def test_a_micro_batch_holds_prompt_response_and_padding_where_it_says() -> None:
    (batch,) = cut(
        [sample(0, 0, p=2, r=2, advantage=0.5), sample(0, 1, p=2, r=3, advantage=-0.5)],
        budget_tokens=100,
        keep_zero=False,
    )
    assert batch.input_ids.tolist() == [[1, 2, 20, 21, 22], [1, 2, 20, 21, 0]]
    assert batch.loss_weight.tolist() == [[0, 0, 1, 1, 1], [0, 0, 1, 1, 0]]
    assert batch.advantages.tolist() == [[0, 0, -0.5, -0.5, -0.5], [0, 0, 0.5, 0.5, 0]]
    assert batch.behaviour_logprobs.tolist() == [[0, 0, -1, -1, -1], [0, 0, -1, -1, 0]]
    assert batch.lengths.tolist() == [5, 4]
    assert batch.prompt_lengths.tolist() == [2, 2]


def test_samples_of_zero_advantage_are_left_out_unless_something_else_teaches_them() -> None:
    samples = [sample(0, 0, advantage=0.0), sample(0, 1, advantage=1.0)]
    assert sum(len(b.lengths) for b in cut(samples, budget_tokens=100, keep_zero=False)) == 1
    assert sum(len(b.lengths) for b in cut(samples, budget_tokens=100, keep_zero=True)) == 2


def test_a_response_without_tokens_is_left_out() -> None:
    assert cut([sample(0, 0, r=0)], budget_tokens=100, keep_zero=True) == []


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 120))
def test_micro_batches_keep_to_the_budget_and_hold_every_sample_once(lengths: list[int], budget: int) -> None:
    samples = [sample(i, 0, r=r) for i, r in enumerate(lengths)]
    batches = cut(samples, budget_tokens=budget, keep_zero=False)
    assert sum(b.loss_weight.sum() for b in batches) == sum(lengths)
    for batch in batches:
        rows, width = batch.input_ids.shape
        assert rows * width <= budget or rows == 1


def test_the_cut_does_not_depend_on_the_order_of_the_samples() -> None:
    samples = [sample(i % 5, i, r=1 + i % 4) for i in range(20)]
    shuffled = samples[:]
    random.Random(1).shuffle(shuffled)
    one, two = cut(samples, budget_tokens=30, keep_zero=False), cut(shuffled, budget_tokens=30, keep_zero=False)
    assert [b.input_ids.tolist() for b in one] == [b.input_ids.tolist() for b in two]


def test_siblings_stay_together_where_prompts_are_most_of_the_tokens() -> None:
    samples = [sample(prompt, sibling, p=20, r=1 + 3 * sibling) for prompt in range(3) for sibling in range(3)]
    batches = cut(samples, budget_tokens=3 * 27, keep_zero=False)
    assert [batch.lengths.tolist() for batch in batches] == [[27, 24, 21]] * 3


def test_samples_of_like_length_stay_together_where_responses_are_most_of_the_tokens() -> None:
    samples = [sample(prompt, sibling, p=2, r=1 + 9 * sibling) for prompt in range(3) for sibling in range(3)]
    batches = cut(samples, budget_tokens=3 * 21, keep_zero=False)
    assert [batch.lengths.tolist() for batch in batches] == [[21] * 3, [12] * 3 + [3] * 2, [3]]
