"""Idle workers take what a step waits for, and no more than makes all of them equally full."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors.policies.assigning.relieve import Running, decide, orders, pays


def running(*samples: tuple[int, int, int]) -> Running:
    """(Step, tokens, who runs it) of each, numbered from 0."""
    return Running(*np.array(samples, np.int64).reshape(-1, 3).T)


SAMPLES = st.lists(st.tuples(st.integers(3, 5), st.sampled_from([0, 7, 100, 5000]), st.integers(0, 3)), max_size=60)


def test_the_oldest_step_goes_first_and_of_it_what_has_the_most_tokens() -> None:
    here = running((4, 900, 0), (3, 100, 0), (3, 800, 0), (3, 500, 0))
    assert decide(here, 1, workers=2).tolist() == [2, 3]
    assert decide(here, 2, workers=3).tolist() == [2, 3]
    assert decide(here, 3, workers=4).tolist() == [2, 3, 1], "never one of a newer step"


def test_of_those_with_as_many_tokens_workers_give_one_each_in_turn() -> None:
    here = running(*((3, 10, 0) for _ in range(4)), *((3, 10, 1) for _ in range(4)))
    assert decide(here, 2, workers=4).tolist() == [0, 4, 1, 5]


def test_a_worker_with_all_of_the_longest_is_not_stripped_of_them() -> None:
    """It keeps as many as all will have, and the rest comes from others."""
    here = running(*((3, 900, 0) for _ in range(6)), *((3, 10, 1) for _ in range(6)))
    moves = decide(here, 2, workers=4)
    assert Counter(here.sources[moves].tolist()) == {0: 3, 1: 3}
    assert moves.tolist() == [0, 1, 2, 6, 7, 8]


def test_of_the_oldest_step_a_worker_gives_what_it_has_too_many_of_all_steps() -> None:
    """Five of a newer step beside it: one of the oldest may go, although it has but one."""
    here = running((3, 10, 0), *((4, 10, 0) for _ in range(5)), *((4, 10, 1) for _ in range(3)))
    assert decide(here, 1, workers=3).tolist() == [0]
    assert decide(running((3, 10, 0), *((4, 10, 1) for _ in range(8))), 1, workers=3).tolist() == []


def test_nobody_is_moved_to_nobody_and_nothing_from_nowhere() -> None:
    assert not len(decide(running(), 1, workers=2))
    assert not len(decide(running((0, 10, 0)), 0, workers=2))


@given(samples=SAMPLES, idle=st.integers(1, 4), busy=st.integers(1, 4))
def test_no_worker_gets_more_than_its_share_or_keeps_less_and_no_newer_step_goes(
    samples: list[tuple[int, int, int]], idle: int, busy: int
) -> None:
    samples = [(step, tokens, source % busy) for step, tokens, source in samples]
    moves = decide(running(*samples), idle, idle + busy).tolist()
    assert len(set(moves)) == len(moves)
    dealt = Counter(i % idle for i in range(len(moves)))
    assert all(count <= -(-len(samples) // (idle + busy)) for count in dealt.values())
    assert {samples[i][0] for i in moves} <= {min((step for step, _, _ in samples), default=0)}
    had = Counter(source for _, _, source in samples)
    gave = Counter(samples[i][2] for i in moves)
    assert all(had[source] - count >= len(samples) // (idle + busy) for source, count in gave.items())


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
