"""Longest first: the order, and Graham's bound on what it leads to."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors.policies.longest_first import longest_first


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
