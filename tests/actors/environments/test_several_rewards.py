"""Several rewards with weights: each has its own value, the reward is their sum, and without one there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.environments.errors import RewardRefused, ScorerBroken
from actors.environments.prompts.sources import open_sources
from actors.environments.scoring.scorer_pool import ScorerPool
from actors.environments.scoring.scorers import Example, Scorers, make_scorer
from actors.environments.scoring.trial import try_once
from configs.schema import JobConfig
from tests.chat_tokenizer import save_tokenizer
from tests.smallest_job import smallest_job

FUNCTIONS = """
import time

def short(prompt, response, answer, **columns):
    columns.get("list", []).append("mine")
    return -len(response)

def untouched(prompt, response, answer, **columns):
    return float("mine" not in columns.get("list", []))

def picky(prompt, response, answer, **columns):
    if response == "raise":
        raise KeyError("nothing")
    if response == "none":
        return None
    if response == "nan":
        return float("nan")
    if response == "hang":
        time.sleep(60)
    return 1.0

def typo(prompt, response, answer, **columns):
    return undefined_name
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"several_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(FUNCTIONS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def job_of(functions: str, tmp_path: Path, *names: str, **reward: Any) -> JobConfig:
    """Exact match, weighing 1, and these functions, weighing a half."""
    rows = [{"prompt": "2+2", "answer": "4", "list": []}, {"prompt": "2+3", "answer": "5", "list": []}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    further = [{"kind": "function", "function": f"{functions}:{name}", "weight": 0.5} for name in names]
    parts = [{"kind": "exact_match", "name": "right"}, *further]
    return smallest_job(data={"path": str(tmp_path / "rows.jsonl")}, reward={"parts": parts, **reward})


def test_the_reward_is_the_weighted_sum_and_each_is_told(functions: str, tmp_path: Path) -> None:
    """The first function changes what it is given; the next one does not see it."""
    scorers = Scorers(job_of(functions, tmp_path, "short", "untouched"))
    reward, parts = scorers.score("4", lambda: Example("2+2", "4", 0, {"list": []}))
    assert parts == [1.0, -1.0, 1.0]
    assert reward == 1.0 + 0.5 * -1.0 + 0.5 * 1.0
    assert [one.name for one in scorers.each] == ["right", "short", "untouched"]


def test_one_reward_has_no_parts_and_is_what_it_was() -> None:
    job = smallest_job(reward={"kind": "exact_match"})
    example = Example("", "4", 0, {})
    assert Scorers(job).score("4", lambda: example) == (1.0, [])
    assert make_scorer(job)("5", example) == 0.0


@pytest.mark.parametrize(
    ("response", "why"),
    [("raise", "reward picky: KeyError: 'nothing'"), ("none", "returned None"), ("nan", "returned nan")],
)
def test_a_sum_that_lacks_one_reward_is_none(functions: str, tmp_path: Path, response: str, why: str) -> None:
    with pytest.raises(ScorerBroken, match="reward picky") as found:
        Scorers(job_of(functions, tmp_path, "picky")).score(response, lambda: Example("", "4", 0, {}))
    assert why in str(found.value)


async def test_parts_cross_the_processes_and_a_failing_one_costs_its_sample_only(
    functions: str, tmp_path: Path
) -> None:
    save_tokenizer(tmp_path / "model")
    job = job_of(functions, tmp_path, "picky", timeout_s=2.0)
    pool = ScorerPool(job, None, tmp_path / "model")
    await pool.start()
    context = (await pool.read(0, 1))["prompts"][0][3]
    (answer,) = await pool.answers([context])
    verdicts = await pool.score([(text, context) for text in (answer, "raise", "hang", "no")])
    await pool.close()
    assert [(verdict.reward, verdict.parts) for verdict in verdicts] == [
        (1.5, (1.0, 1.0)),
        (None, ()),
        (None, ()),
        (0.5, (0.0, 1.0)),
    ]
    assert "reward picky: KeyError" in verdicts[1].reason
    assert "reward.timeout_s (2.0 s)" in verdicts[2].reason


def test_the_trial_calls_each_of_them_and_names_the_one_that_can_only_fail(functions: str, tmp_path: Path) -> None:
    job = job_of(functions, tmp_path, "short", "typo")
    with pytest.raises(RewardRefused, match=rf"reward\.parts\.2\.function {functions}:typo can only fail: NameError"):
        try_once(job, Scorers(job), open_sources(job))


def test_the_trial_warns_of_each_by_its_place(tmp_path: Path, functions: str) -> None:
    job = job_of(functions, tmp_path, "short")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2+2", "answer": "none"}\n')
    picky = [{"kind": "function", "function": f"{functions}:picky", "name": name} for name in ("one", "two")]
    job = smallest_job(data={"path": str(tmp_path / "rows.jsonl")}, reward={"parts": picky})
    warnings = try_once(job, Scorers(job), open_sources(job))
    assert [warning.split()[0] for warning in warnings] == ["reward.parts.0.function", "reward.parts.1.function"]
