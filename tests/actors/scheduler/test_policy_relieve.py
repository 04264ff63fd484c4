"""Idle workers take what a step waits for, and no more than makes all of them equally full."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors.scheduler.policies.relieve import Running, by_turns, decide, orders, pays


def running(*samples: tuple[int, int]) -> Running:
    """(Step, tokens) of each, numbered from 0."""
    steps, tokens = np.array(samples, np.int64).reshape(-1, 2).T
    return Running(steps, tokens, np.arange(len(samples)))


SAMPLES = st.lists(st.tuples(st.integers(3, 5), st.integers(0, 5000)), max_size=60)


def test_the_oldest_step_goes_first_and_of_it_what_has_the_most_tokens() -> None:
    here = running((4, 900), (3, 100), (3, 800), (3, 500))
    assert decide(here, 1, workers=2).tolist() == [2, 3]
    assert decide(here, 2, workers=3).tolist() == [2, 3]
    assert decide(here, 3, workers=4).tolist() == [2, 3, 1], "never one of a newer step"


def test_of_those_with_as_many_tokens_the_first_in_order_goes() -> None:
    here = Running(np.zeros(3, np.int32), np.full(3, 10), np.array([7, 3, 5]))
    assert decide(here, 2, workers=3).tolist() == [1, 2]


@given(sources=st.lists(st.integers(0, 4), max_size=40))
def test_by_turns_no_worker_gives_two_before_another_has_given_one(sources: list[int]) -> None:
    turns = by_turns(np.array(sources, np.int64)).tolist()
    for worker in set(sources):
        own = [turn for turn, source in zip(turns, sources, strict=True) if source == worker]
        assert own == list(range(len(own)))


def test_nobody_is_moved_to_nobody_and_nothing_from_nowhere() -> None:
    assert not len(decide(running(), 1, workers=2))
    assert not len(decide(running((0, 10)), 0, workers=2))


@given(samples=SAMPLES, idle=st.integers(1, 4), busy=st.integers(1, 4))
def test_no_worker_gets_more_than_its_share_and_no_newer_step_goes(
    samples: list[tuple[int, int]], idle: int, busy: int
) -> None:
    moves = decide(running(*samples), idle, idle + busy).tolist()
    assert len(set(moves)) == len(moves)
    dealt = Counter(i % idle for i in range(len(moves)))
    assert all(count <= -(-len(samples) // (idle + busy)) for count in dealt.values())
    assert {samples[i][0] for i in moves} <= {min((step for step, _ in samples), default=0)}


def test_a_move_pays_where_a_step_is_clearly_shorter_and_never_unmeasured() -> None:
    assert pays(0.10, 0.09)
    assert not pays(0.10, 0.097)
    assert not pays(float("nan"), 0.09)
    assert not pays(0.10, float("nan"))


@given(at=st.lists(st.integers(0, 4), max_size=60), idle=st.integers(1, 6))
def test_orders_of_a_relief_are_few_and_give_every_idle_worker_as_many_as_it_was_dealt(
    at: list[int], idle: int
) -> None:
    ordered = orders(np.array(at, np.int64), idle)
    assert sorted(i for _, _, which in ordered for i in which.tolist()) == list(range(len(at)))
    assert all(at[i] == source for source, _, which in ordered for i in which.tolist())
    dealt = Counter(i % idle for i in range(len(at)))
    assert Counter(target for _, target, which in ordered for _ in which) == dealt
    assert len({(source, target) for source, target, _ in ordered}) == len(ordered)
    assert len(ordered) <= max(0, len(set(at)) + len(dealt) - 1)
