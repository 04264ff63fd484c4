"""What each kind of scorer says of a response."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from actors.environments.errors import ScorerBroken
from actors.environments.scoring.scorers import Example, make_scorer
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


WORKED = "In May she sold 48/2 = <<48/2=24>>24 clips.\nTogether that is 48+24 = <<48+24=72>>72.\n#### 72"
"""An answer as GSM8K writes it."""


@pytest.mark.parametrize("kind", ["exact_match", "math_verify"])
@pytest.mark.parametrize(
    ("response", "reward"),
    [("24 + 48\n#### 72", 1.0), ("#### 72.", 1.0), ("#### $72", 1.0), ("#### 24", 0.0), ("72", 0.0)],
)
def test_a_reference_that_is_a_worked_solution_is_cut_as_the_response_is(
    kind: str, response: str, reward: float
) -> None:
    """The pattern is the one in the guide: the reference's last match is compared, not its whole text."""
    guide = (Path(__file__).parents[3] / "docs/guides/bring_your_own_task.md").read_text(encoding="utf-8")
    (pattern,) = re.findall(r"answer_pattern: '(.+)'", guide)
    scorer = make_scorer(job({"kind": kind, "answer_pattern": pattern}))
    assert scorer(response, example(WORKED)) == reward


def test_a_function_gets_the_reference_as_it_stands_in_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever brings a function says what the answer column means."""
    module = types.ModuleType("scorers_for_test")
    module.score = lambda prompt, response, answer, **_: float((response, answer) == ("72", WORKED))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "scorers_for_test", module)
    reward = {"kind": "function", "function": "scorers_for_test:score", "answer_pattern": r"#### (\d+)"}
    assert make_scorer(job(reward))("#### 72", example(WORKED)) == 1.0


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
    from actors.environments.prompts.sources import open_source

    data = {"source": "reasoning_gym", "task": "spell_backward", "size": 5}
    config = job({"kind": "reasoning_gym"}, data)
    row = open_source(config.data, config.seed).row(3)
    scorer = make_scorer(config)
    assert scorer(row.answer, example(row.answer, index=3)) == 1.0
    assert scorer("certainly not", example(row.answer, index=3)) < 0.5
