"""avg@k and pass@k, against every choice of k among n."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.scheduler.evaluations import averages, ks, pass_at_k


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_choices_of_k_that_hold_one_that_passes(
    passes: list[bool], data: st.DataObject
) -> None:
    n = len(passes)
    k = data.draw(st.integers(1, n))
    choices = list(itertools.combinations(passes, k))
    expected = sum(any(choice) for choice in choices) / len(choices)
    assert pass_at_k(n, sum(passes), k) == pytest.approx(expected, abs=1e-12)


@given(st.integers(1, 4000), st.data())
def test_pass_at_k_is_a_probability_and_grows_with_k_whatever_the_numbers(n: int, data: st.DataObject) -> None:
    passed, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    value = pass_at_k(n, passed, k)
    assert 0.0 <= value <= 1.0
    assert value <= pass_at_k(n, passed, min(k + 1, n)) + 1e-12
    assert pass_at_k(n, passed, 1) == pytest.approx(passed / n)


def test_the_ks_are_the_powers_of_two_up_to_the_number_of_samples_and_that_itself() -> None:
    assert [ks(n) for n in (1, 2, 3, 8, 12)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12]]


def test_a_prompt_counts_with_the_samples_that_have_a_verdict() -> None:
    missing = math.nan
    found = averages(np.array([[1.0, 0.0], [0.5, missing], [missing, missing]]), pass_reward=1.0)
    assert found["avg_at_k"] == 0.5, "the mean of a half and a half; of the third nothing is known"
    assert found["pass_at_1"] == 0.25 and found["pass_at_2"] == 1.0, "two samples has the first alone"
    nothing = averages(np.full((2, 2), missing), pass_reward=1.0)
    assert math.isnan(nothing["avg_at_k"]) and math.isnan(nothing["pass_at_2"])
