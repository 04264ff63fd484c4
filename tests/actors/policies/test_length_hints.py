"""Lengths from hints: their order at first, then a line through what has been answered."""

from __future__ import annotations

import numpy as np
import pytest

from actors.policies.length_hints import LengthHints


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
