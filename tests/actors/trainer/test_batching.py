"""Windows and micro-batches: deterministic under any order of arrival, nothing lost, nothing twice."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.protocol.groups import GroupGrant
from actors.trainer.batching import Inbox, TrainSample, cut, group_samples
from actors.trainer.consumption import Consumption
from actors.trainer.errors import BadGrant
from actors.trainer.rules import LearningRule
from configs.learning_schema import AlgorithmConfig

GRPO = LearningRule(AlgorithmConfig(), 100)


def grant(
    prompt: int, *, step: int = 0, rewards: tuple[float, ...] = (1.0, 0.0), lengths=None, version: int = 0
) -> GroupGrant:
    g = len(rewards)
    sizes = np.array(lengths or [2 + prompt % 3] * g, dtype=np.int32)
    total = int(sizes.sum())
    return GroupGrant(
        job="j", step=step, prompt=prompt, replay=False, prompt_ids=np.arange(3, 6 + prompt % 2, dtype=np.int32),
        siblings=np.arange(g, dtype=np.int32), lengths=sizes, tokens=np.arange(total, dtype=np.int32) + 10 * prompt,
        logprobs=-np.arange(total, dtype=np.float32), versions=np.full(total, version, dtype=np.int32),
        finished=np.ones(g, dtype=np.uint8), rewards=np.array(rewards),
    )  # fmt: skip


def inbox(*, in_order: bool = True, prompts: int = 8, window: int = 2, step: int = 0) -> Inbox:
    plan = Consumption(window, in_order=in_order)
    return Inbox(step=step, expected=range(step * prompts, (step + 1) * prompts), plan=plan)


def prompts_of(windows: list[list[GroupGrant]]) -> list[list[int]]:
    return [[group.prompt for group in window] for window in windows]


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


def test_a_trainer_that_lags_behind_finds_all_that_has_come_in_one_window() -> None:
    box = inbox(in_order=False)
    box.add(grant(6))
    assert box.ready() == []
    for prompt in (3, 0):
        box.add(grant(prompt))
    assert prompts_of(box.ready()) == [[0, 3, 6]]
    for prompt in (1, 2, 4, 5):
        box.add(grant(prompt))
    assert prompts_of(box.ready()) == [[1, 2, 4, 5]]
    box.add(grant(7))
    assert prompts_of(box.ready()) == [[7]], "the last one that is expected waits for nobody"


def test_a_window_is_handed_out_once_when_all_its_prompts_are_there() -> None:
    box = inbox()
    box.add(grant(1))
    assert box.ready() == []
    box.add(grant(0))
    assert prompts_of(box.ready()) == [[0, 1]]
    assert box.ready() == []


def test_in_order_a_later_window_waits_for_the_earlier_ones() -> None:
    box = inbox(in_order=True)
    for prompt in (2, 3):
        box.add(grant(prompt))
    assert box.ready() == []
    for prompt in (0, 1):
        box.add(grant(prompt))
    assert prompts_of(box.ready()) == [[0, 1], [2, 3]]


def test_out_of_order_a_later_window_does_not_wait() -> None:
    box = inbox(in_order=False)
    for prompt in (2, 3):
        box.add(grant(prompt))
    assert prompts_of(box.ready()) == [[2, 3]]


def test_dropped_prompts_hold_up_nothing_once_the_step_is_granted() -> None:
    box = inbox()
    for prompt in (0, 2, 3):
        box.add(grant(prompt))
    box.close(groups=3)
    assert box.complete
    assert prompts_of(box.ready()) == [[0], [2, 3]]
    assert box.exhausted


def test_prompts_outside_the_expected_range_are_trained_last() -> None:
    box = inbox(prompts=2, window=2)
    for prompt in (99, 1, 0, 50):
        box.add(grant(prompt))
    assert prompts_of(box.ready()) == [[0, 1]]
    box.close(groups=4)
    assert prompts_of(box.ready()) == [[50, 99]]
    assert box.exhausted


def test_duplicates_and_other_steps_are_not_taken() -> None:
    box = inbox()
    assert box.add(grant(0))
    assert not box.add(grant(0))
    assert not box.add(grant(1, step=7))
    assert len(box.groups) == 1


def test_a_group_that_is_granted_anew_with_other_samples_before_it_was_handed_out_takes_the_place_of_the_first() -> (
    None
):
    box = inbox()
    box.add(grant(0, rewards=(1.0, 0.0)))
    assert not box.add(grant(0, rewards=(0.0, 1.0))), "it is counted once"
    assert (box.changed, box.missing) == (None, 7)
    box.add(grant(1))
    [[first, _]] = box.ready()
    assert first.rewards.tolist() == [0.0, 1.0]


def test_a_group_that_was_handed_out_and_is_granted_anew_voids_the_step_only_with_other_samples() -> None:
    box = inbox()
    for prompt in (0, 1):
        box.add(grant(prompt))
    box.ready()
    box.add(grant(1))
    assert box.changed is None
    box.add(grant(1, lengths=[1, 1]))
    assert box.changed == 1
    assert box.ready() == [], "it is not handed out twice"


def test_a_step_that_says_it_sent_more_than_came_has_lost_groups() -> None:
    box = inbox()
    box.add(grant(0))
    box.close(groups=2)
    assert box.has_lost_groups and not box.complete
    box.add(grant(1))
    assert box.complete and not box.has_lost_groups


@given(
    seed=st.integers(0, 10_000), window=st.integers(1, 9), in_order=st.booleans(), dropped=st.sets(st.integers(0, 7))
)
def test_whatever_the_order_of_arrival_each_group_is_trained_exactly_once(seed, window, in_order, dropped) -> None:
    """And in order, the sequence of windows is the same for all arrivals."""
    arrivals = [prompt for prompt in range(8) if prompt not in dropped]
    random.Random(seed).shuffle(arrivals)
    box = inbox(window=window, in_order=in_order)
    handed: list[list[int]] = []
    for prompt in arrivals:
        box.add(grant(prompt))
        handed += prompts_of(box.ready())
    box.close(groups=len(arrivals))
    handed += prompts_of(box.ready())
    assert sorted(p for w in handed for p in w) == sorted(arrivals)
    assert box.exhausted
    if in_order:
        expected = [[p for p in range(s, min(s + window, 8)) if p not in dropped] for s in range(0, 8, window)]
        assert handed == [w for w in expected if w]


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
