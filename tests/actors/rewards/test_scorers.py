"""What each kind of scorer says of a response."""

from __future__ import annotations

from typing import Any

import pytest

from actors.rewards.errors import ScorerBroken
from actors.rewards.scorers import Example, make_scorer
from configs.schema import JobConfig
from tests.smallest_job import smallest_job


def job(reward: dict[str, Any], data: dict[str, Any] | None = None) -> JobConfig:
    return smallest_job(reward=reward) if data is None else smallest_job(reward=reward, data=data)


def example(answer: str, index: int = 0) -> Example:
    return Example(prompt="", answer=answer, index=index, extra={})


@pytest.mark.parametrize(
    ("response", "reward"), [("four", 1.0), ("  four\n", 1.0), ("Four", 0.0), ("", 0.0), ("four five", 0.0)]
)
def test_exact_match_forgives_white_space_only(response: str, reward: float) -> None:
    """Nothing but the words counts, and all of them do."""
    assert make_scorer(job({"kind": "exact_match"}))(response, example("four")) == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [("<answer>1</answer> no, <answer>4</answer>", 1.0), ("<answer>5</answer>", 0.0), ("4", 0.0)],
)
def test_the_answer_is_the_last_match_of_the_pattern(response: str, reward: float) -> None:
    """A model may change its mind; a response without an answer is wrong, not broken."""
    scorer = make_scorer(job({"kind": "exact_match", "answer_pattern": "<answer>(.*?)</answer>"}))
    assert scorer(response, example("4")) == reward


@pytest.mark.parametrize(
    ("response", "reward"), [(r"so it is \boxed{\frac{1}{2}}", 1.0), ("0.5", 1.0), (r"\boxed{3}", 0.0), ("?", 0.0)]
)
def test_math_verify_knows_equal_numbers_in_other_clothes(response: str, reward: float) -> None:
    """The reference is a fraction; the response may write it as it likes."""
    assert make_scorer(job({"kind": "math_verify"}))(response, example(r"$\frac{1}{2}$")) == reward


def test_a_reference_answer_that_is_no_mathematics_is_a_failure_and_no_zero() -> None:
    """The data is at fault, not the model."""
    with pytest.raises(ScorerBroken, match="reference answer"):
        make_scorer(job({"kind": "math_verify"}))("1", example(""))


def test_reasoning_gym_scores_with_the_tasks_own_scorer() -> None:
    """The row's own answer earns 1."""
    from actors.rewards.sources import open_source

    data = {"source": "reasoning_gym", "task": "spell_backward", "size": 5}
    config = job({"kind": "reasoning_gym"}, data)
    row = open_source(config.data, config.seed).row(3)
    scorer = make_scorer(config)
    assert scorer(row.answer, example(row.answer, index=3)) == 1.0
    assert scorer("certainly not", example(row.answer, index=3)) < 0.5
