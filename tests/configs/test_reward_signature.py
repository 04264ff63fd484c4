"""A reward function that its call cannot fit is refused from its source, before anything is imported or started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.checks.data_checks import check_data
from tests.smallest_job import smallest_job

ROW = {"prompt": "2+2", "answer": "4", "level": 1}


@pytest.fixture
def problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``problems(source, *rows)``: what is said of the function ``score`` of that source over these rows."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def check(source: str, *rows: dict[str, Any]) -> list[str]:
        name = f"signed_{len(list(tmp_path.iterdir()))}"
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('never imported')\n{source}")
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or [ROW]))
        data = {"source": "jsonl", "path": str(tmp_path / "rows.jsonl")}
        found = check_data(smallest_job(data=data, reward={"kind": "function", "function": f"{name}:score"}))
        return [f"{field}: {wrong}. {fix}" for field, wrong, fix in found]

    return check


@pytest.mark.parametrize(
    "parameters",
    [
        "prompt, response, answer, **columns",
        "p, r, a, level",
        "p, r, a, level, weight=1.0",
        "p, r, a, *, level, weight=1.0",
        "*args, **columns",
        "p, r, a, /, level",
    ],
)
def test_a_function_that_the_call_fits_is_accepted(problems: Any, parameters: str) -> None:
    assert problems(f"def score({parameters}): return 1.0") == []


def test_a_class_gives_no_reward_unless_its_objects_are_numbers(problems: Any) -> None:
    (problem,) = problems("class score:\n    def __call__(self, p, r, a): ...")
    assert "is a class, and calling it gives an object, not a number" in problem
    assert problems("class score:\n    def __float__(self): return 1.0") == []
    assert problems("class score(float): ...") == []


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def score(completions, **kwargs): return [1.0]", "takes lists of completions, as TRL calls it"),
        ("def score(response, answer, **columns): return 1.0", "takes response and answer only"),
        ("def score(): return 1.0", "takes no parameter by position"),
        ("async def score(p, r, a, **columns): return 1.0", "coroutine function, and nobody would await it"),
        ("def score(p, r, a, tests, **columns): return 1.0", "needs 'tests', and line 1 has no such column"),
        ("def score(p, r, a, *, tests, **columns): return 1.0", "(its further columns are level)"),
        ("def score(p, r, a, levels, **columns): return 1.0", "Did you mean 'level'?"),
        ("def score(p, r, a): return 1.0", "does not take the column 'level'"),
    ],
)
def test_a_function_that_the_call_cannot_fit_is_refused_with_what_to_write(
    problems: Any, source: str, says: str
) -> None:
    (problem,) = problems(source)
    assert says in problem and problem.startswith("reward.function: ")


def test_a_column_that_only_the_first_rows_have_is_missed_with_its_line(problems: Any) -> None:
    (problem,) = problems("def score(p, r, a, level): return 1.0", ROW, {"prompt": "1+1", "answer": "2"})
    assert "needs 'level', and line 2 has no such column" in problem


def test_a_generated_task_has_no_further_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "of_task.py").write_text("def score(prompt, response, answer, *, tests): return 1.0")
    data = {"source": "reasoning_gym", "task": "spell_backward"}
    ((field, wrong, _),) = check_data(smallest_job(data=data, reward={"kind": "function", "function": "of_task:score"}))
    assert field == "reward.function" and "a reasoning_gym task has no such column" in wrong
