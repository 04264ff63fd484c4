"""Advantages against values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.trainer.advantages import centred, group_normalised, is_degenerate, leave_one_out
from actors.trainer.algorithms import ALGORITHMS, BatchShape, algorithm_named
from actors.trainer.errors import BadGrant

RULES = [group_normalised, centred, leave_one_out]


def test_grpo_divides_by_the_sample_standard_deviation() -> None:
    # mean 0.5, squared deviations 4 * 0.25, divided by 3: std = sqrt(1/3) = 0.57735
    result = group_normalised(np.array([1.0, 0.0, 1.0, 0.0]))
    np.testing.assert_allclose(result, [0.8660254, -0.8660254, 0.8660254, -0.8660254], rtol=1e-5)


def test_dr_grpo_only_centres() -> None:
    np.testing.assert_allclose(centred(np.array([3.0, 0.0, 0.0])), [2.0, -1.0, -1.0])


def test_rloo_compares_each_with_the_mean_of_the_others() -> None:
    # 3 - (0 + 1) / 2, 0 - (3 + 1) / 2, 1 - (3 + 0) / 2
    np.testing.assert_allclose(leave_one_out(np.array([3.0, 0.0, 1.0])), [2.5, -2.0, -0.5])


@pytest.mark.parametrize("rule", RULES)
def test_equal_rewards_give_exactly_zero_whatever_the_rounding_of_their_mean(rule) -> None:
    # the mean of three 0.1 is 0.10000000000000002 in binary
    assert rule(np.full(3, 0.1)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("rule", RULES)
def test_a_group_of_which_one_sibling_is_left_teaches_nothing(rule) -> None:
    assert rule(np.array([1.0])).tolist() == [0.0]
    assert is_degenerate(np.array([1.0]))


@pytest.mark.parametrize("rule", RULES)
@given(rewards=st.lists(st.floats(-100, 100), min_size=2, max_size=16))
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order_of_rewards(rule, rewards) -> None:
    values = np.array(rewards)
    result = rule(values)
    assert abs(result.sum()) < 1e-6
    order = np.argsort(values, kind="stable")
    assert (np.diff(result[order]) >= -1e-9).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rewards", [[1.0, float("nan")], [float("inf"), 0.0], [], [[1.0, 0.0]]])
def test_rewards_that_are_no_finite_column_are_refused_by_name(rule, rewards) -> None:
    with pytest.raises(BadGrant, match="rewards"):
        rule(np.array(rewards))


@pytest.mark.parametrize(("name", "divisor"), [("grpo", 100.0), ("dr_grpo", 8 * 64.0), ("rloo", 8.0)])
def test_each_rule_divides_the_summed_losses_by_its_own_measure(name: str, divisor: float) -> None:
    shape = BatchShape(samples=8, response_tokens=100, max_response_tokens=64)
    assert algorithm_named(name).normaliser(shape) == divisor


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_step_of_which_everything_was_dropped_still_has_a_divisor(name: str) -> None:
    assert ALGORITHMS[name].normaliser(BatchShape(samples=0, response_tokens=0, max_response_tokens=8)) >= 1.0


def test_an_unknown_rule_is_named_together_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match="dr_grpo"):
        algorithm_named("reinforce")
