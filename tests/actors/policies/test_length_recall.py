"""Recall of the longest: 1 for the right order, the fraction itself for none, whatever is tied."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.policies.length_recall import recall_of_longest


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
