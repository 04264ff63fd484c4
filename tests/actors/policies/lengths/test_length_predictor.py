"""Order and recall of predicted lengths, and lengths from hints. Predictors themselves: ``tests/contracts``."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.policies.lengths.length_predictor import LengthHints, longest_first, recall_of_longest

# ------------------------------------------------------------ the order, and Graham's bound on what it leads to


def test_the_longest_comes_first_and_what_is_not_known_last() -> None:
    assert longest_first(np.array([3.0, np.nan, 9.0, 5.0])).tolist() == [2, 3, 0, 1]


def test_equal_estimates_keep_their_order() -> None:
    assert longest_first(np.full(50, 7.0)).tolist() == list(range(50))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6), st.integers(1, 3))
def test_with_exact_lengths_it_ends_within_four_thirds_of_the_best_schedule(lengths: list[int], places: int) -> None:
    """The best of all ways to share them among the places."""
    free = [0] * places
    for i in longest_first(np.array(lengths)):
        heapq.heapreplace(free, free[0] + lengths[i])
    best = min(
        max(sum(length for length, place in zip(lengths, shares, strict=True) if place == p) for p in range(places))
        for shares in itertools.product(range(places), repeat=len(lengths))
    )
    assert max(free) <= best * (4 / 3 - 1 / (3 * places))


# ------------------------------------------------------------ recall: 1 for the right order, the fraction for none


@pytest.mark.parametrize("fraction", [0.2, 0.1, 0.05])
def test_the_right_order_finds_all_and_no_order_finds_what_chance_finds(fraction: float) -> None:
    actual = np.arange(100.0)
    assert recall_of_longest(actual * 3 + 1, actual, fraction) == 1.0
    assert recall_of_longest(-actual, actual, fraction) == 0.0
    assert recall_of_longest(np.ones(100), actual, fraction) == pytest.approx(fraction)


def test_half_of_the_longest_found_is_a_half() -> None:
    actual = np.array([9.0, 8, 1, 1, 1, 1, 1, 1, 1, 1])
    assert recall_of_longest(np.array([5.0, 1, 4, 1, 1, 1, 1, 1, 1, 1]), actual, 0.2) == 0.5


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=40), st.floats(0.01, 1.0))
def test_it_is_between_0_and_1_and_equals_its_mean_over_ways_to_break_ties(
    pairs: list[tuple[int, int]], fraction: float
) -> None:
    predicted, actual = (np.array(column, np.float64) for column in zip(*pairs, strict=True))
    recall = recall_of_longest(predicted, actual, fraction)
    assert -1e-9 <= recall <= 1 + 1e-9
    rng = np.random.default_rng(0)
    broken = [
        recall_of_longest(predicted + rng.random(len(pairs)) / 2, actual + rng.random(len(pairs)) / 2, fraction)
        for _ in range(300)
    ]
    assert recall == pytest.approx(np.mean(broken), abs=0.2)


# ------------------------------------------------------------ hints: their order, then a line through the answers


def test_before_the_first_answer_hints_stand_for_themselves() -> None:
    assert LengthHints().expected(np.array([7, 3])).tolist() == [7.0, 3.0]


def test_lengths_that_follow_their_hints_are_found_again() -> None:
    lengths = LengthHints()
    for hints in (np.array([1, 5]), np.array([10, 20, 30])):
        lengths.observe(hints, 40.0 + 3.0 * hints)
    assert lengths.expected(np.array([2, 100])) == pytest.approx([46.0, 340.0])


@pytest.mark.parametrize("answers", [[50.0, 30.0, 50.0, 30.0], [40.0, 30.0, 20.0, 10.0]])
def test_hints_that_say_nothing_or_the_opposite_come_to_the_mean(answers: list[float]) -> None:
    lengths = LengthHints()
    lengths.observe(np.array([1, 2, 3, 4]), np.array([*answers[:2], np.nan, answers[3]]))
    lengths.observe(np.array([3]), np.array(answers[2:3]))
    assert len(set(lengths.expected(np.array([1, 2, 1000])).round(6).tolist())) == 1


def test_equal_hints_are_no_division_by_zero() -> None:
    lengths = LengthHints()
    lengths.observe(np.array([4, 4]), np.array([10.0, 20.0]))
    assert lengths.expected(np.array([4, 8])).tolist() == [15.0, 15.0]
