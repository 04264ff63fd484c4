"""What a job file says of its evaluation, and what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.errors import ConfigError
from configs.loader import job_from_mapping


def job(tmp_path: Path, held_out: list[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    other = [{"prompt": "c", "answer": "d"}] if held_out is None else held_out
    for name, rows in (("train", [{"prompt": "a", "answer": "b"}]), ("held_out", other)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation = {"data": {"path": str(tmp_path / "held_out.jsonl")}} | changes.pop("eval", {})
    return {
        "name": "j",
        "steps": 1,
        "model": {"source": "tiny"},
        "data": {"path": str(tmp_path / "train.jsonl")},
        "reward": {"kind": "exact_match"},
        "eval": evaluation,
    } | changes


def refused(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        job_from_mapping(values)
    return str(caught.value)


def test_a_job_may_say_no_more_than_the_data(tmp_path: Path) -> None:
    loaded = job_from_mapping(job(tmp_path))
    assert loaded.eval is not None and loaded.eval.samples == 1 and loaded.eval.every == 50
    assert loaded.evaluation.rollout.max_tokens == loaded.rollout.max_tokens
    assert loaded.evaluation.seed != loaded.seed, "generated tasks and noise are not those of training"
    assert set(loaded.all_sources) == {"", "eval.data"}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("samples", 0, "greater than or equal to 1"),
        ("every", 0, "greater than or equal to 1"),
        ("prompts", 0, "greater than or equal to 1"),
        ("temperature", -0.5, "greater than or equal to 0"),
        ("top_p", 0.0, "greater than 0"),
        ("top_p", 1.5, "less than or equal to 1"),
        ("pass_reward", float("nan"), "finite"),
        ("evry", 3, "Did you mean"),
    ],
)
def test_what_is_outside_its_range_is_named_with_its_value(tmp_path: Path, key: str, value: Any, said: str) -> None:
    text = refused(job(tmp_path, eval={key: value}))
    assert f"eval.{key}" in text and said in text


def test_several_samples_without_temperature_are_refused(tmp_path: Path) -> None:
    text = refused(job(tmp_path, eval={"samples": 4, "temperature": 0}))
    assert "eval.temperature" in text and "makes all 4 samples of a prompt equal" in text
    job_from_mapping(job(tmp_path, eval={"samples": 1, "temperature": 0}))


def test_data_that_is_empty_missing_or_has_other_columns_is_refused_under_its_own_key(tmp_path: Path) -> None:
    assert "eval.data.path" in refused(job(tmp_path, held_out=[]))
    assert "eval.data" in refused(job(tmp_path, held_out=[{"question": "c", "answer": "d"}]))
    values = job(tmp_path)
    values["eval"]["data"]["path"] = "nowhere.jsonl"
    assert "eval.data.path" in refused(values)


def test_what_does_not_go_together_is_said(tmp_path: Path) -> None:
    plain = job(tmp_path)
    del plain["eval"]
    assert "nothing says which checkpoint is best" in refused(plain | {"checkpoint": {"keep_best": True}})
    with_epochs = job(tmp_path)
    with_epochs["eval"]["data"]["epochs"] = 2
    assert "eval.data.epochs" in refused(with_epochs)
