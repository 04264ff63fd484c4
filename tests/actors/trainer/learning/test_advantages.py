"""Advantages against values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.trainer.errors import BadGrant
from actors.trainer.learning.rules import (
    ADVANTAGES,
    LearningRule,
    StepShape,
    centred,
    group_normalised,
    is_degenerate,
    leave_one_out,
    overlong_penalties,
)
from configs.learning_schema import AlgorithmConfig

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


def rule(name: str, **keys: object) -> LearningRule:
    return LearningRule(AlgorithmConfig(name=name, **keys), max_tokens=64)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "divisor"), [("grpo", 100.0), ("dr_grpo", 8 * 64.0), ("rloo", 8.0), ("gspo", 8.0), ("dapo", 100.0)]
)
def test_each_rule_divides_the_summed_losses_by_its_own_measure(name: str, divisor: float) -> None:
    assert rule(name).normaliser(StepShape(samples=8, response_tokens=100, max_response_tokens=64)) == divisor


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_a_step_of_which_everything_was_dropped_still_has_a_divisor(name: str) -> None:
    assert rule(name).normaliser(StepShape(samples=0, response_tokens=0, max_response_tokens=8)) >= 1.0


def test_where_a_sequence_counts_by_its_mean_the_weights_of_its_tokens_add_up_to_one() -> None:
    assert 5 * rule("gspo").token_weight(5) == pytest.approx(1.0)
    assert rule("gspo", loss_mean="token").token_weight(5) == rule("rloo").token_weight(5) == 1.0
    assert rule("gspo").token_weight(0) == 1.0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ppo", [3.0, 0.0, 1.0, 0.0]),
        ("reinforce_pp", [3.0, 0.0, 1.0, 0.0]),
        ("reinforce_pp_baseline", [2.0, -1.0, 0.0, -1.0]),
        # squared deviations 4 + 1 + 0 + 1, divided by 3: std = sqrt(2)
        ("dapo", [2 / np.sqrt(2), -1 / np.sqrt(2), 0.0, -1 / np.sqrt(2)]),
    ],
)
def test_what_a_group_of_four_is_given(name: str, expected: list[float]) -> None:
    found = rule(name).advantages(np.array([3.0, 0.0, 1.0, 0.0]), np.full(4, 9))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_responses_near_the_limit_are_punished_in_a_line_down_to_minus_one_at_it() -> None:
    lengths = np.array([1, 48, 52, 56, 64])
    np.testing.assert_allclose(overlong_penalties(lengths, limit=64, buffer=16), [0.0, 0.0, -0.25, -0.5, -1.0])
    # equal rewards, and so all of the spread is of the lengths: mean -0.5
    found = rule("dr_grpo", overlong={"buffer_tokens": 16}).advantages(np.ones(2), np.array([8, 64]))
    np.testing.assert_allclose(found, [0.5, -0.5])
