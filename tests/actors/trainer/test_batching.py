"""Windows: deterministic under any order of arrival, nothing lost, nothing twice."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors.protocol.groups import GroupGrant
from actors.trainer.batching import Inbox
from actors.trainer.consumption import Consumption


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
