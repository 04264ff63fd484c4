"""Several rewards in a job file: as a list or as a section, checked one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.checks.checks import check_job
from configs.errors import ConfigError
from configs.loader import dump_job, job_from_mapping, load_job
from configs.schema import JobConfig
from supervisors.cli.looking.check import job_schema
from tests.smallest_job import smallest_job

EXACT: dict[str, Any] = {"kind": "exact_match"}
TRAIN: dict[str, Any] = {"preferences": "answers"}
NAMED: dict[str, Any] = {"kind": "exact_match", "name": "strict", "weight": 0.25, "answer_pattern": "(.*)"}


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2+2", "answer": "4"}\n')
    return smallest_job(data={"path": str(tmp_path / "rows.jsonl")}).model_dump(mode="json")


def said(job: dict[str, Any], reward: Any) -> list[str]:
    return [
        f"{field}: {wrong}. {fix}"
        for field, wrong, fix in check_job(JobConfig.model_validate(job | {"reward": reward}))
    ]


def test_a_list_is_short_for_the_parts_of_a_section_and_is_kept_as_such(job: dict[str, Any]) -> None:
    listed = job_from_mapping(job | {"reward": [EXACT, NAMED]})
    assert listed.reward == job_from_mapping(job | {"reward": {"parts": [EXACT, NAMED]}}).reward
    assert listed.reward.names == ["exact_match", "strict"]
    again = JobConfig.model_validate(json.loads(json.dumps(listed.model_dump(mode="json"))))
    assert again == listed
    assert "parts:" in dump_job(listed)


def test_an_editor_accepts_a_section_and_a_list() -> None:
    section, listed = job_schema()["properties"]["reward"]["anyOf"]
    assert section == {"$ref": "#/$defs/RewardConfig"}
    assert listed == {"type": "array", "items": {"$ref": "#/$defs/WeightedReward"}}


def test_a_function_is_called_by_its_name(job: dict[str, Any]) -> None:
    function = {"kind": "function", "function": "my.rewards:format_score"}
    assert JobConfig.model_validate(job | {"reward": [EXACT, function]}).reward.names == ["exact_match", "format_score"]


@pytest.mark.parametrize(
    ("reward", "field", "words"),
    [
        ([EXACT, EXACT], "reward.parts", "2 of them are called 'exact_match'"),
        ([EXACT, {"weight": 1.0}], "reward.parts.1.kind", "is missing"),
        ([], "reward.kind", "is missing, and has no default"),
        ([EXACT | {"weight": 0}], "reward.parts", "all weights are 0"),
        ([EXACT, {"kind": "function"}], "reward.parts.1.function", "package.module:name"),
        ([EXACT, NAMED | {"answer_pattern": "####"}], "reward.parts.1.answer_pattern", "has 0 groups, expected 1"),
        ({"kind": "exact_match", "parts": [NAMED]}, "reward.kind", "so is reward.parts"),
        ([EXACT, {"kind": "reasoning_gym"}], "reward.parts.1.kind", "scores its own tasks only"),
        ([EXACT, {"kind": "function", "function": "json:lods"}], "reward.parts.1.function", "lods"),
        ({"kind": "http"}, "reward.url", "is missing, and reward.kind is http"),
        ([EXACT, {"kind": "http", "url": "ftp://host/x"}], "reward.parts.1.url", "no web address of http or https"),
        ({"kind": "http", "url": "https://me:word@host/"}, "reward.url", "holds a name or a password"),
        ({"kind": "http", "url": "https://host/", "key_env": "NO_SUCH_KEY_7"}, "reward.key_env", "'NO_SUCH_KEY_7'"),
        ({"kind": "http", "url": "https://h/", "answer_pattern": "(x)"}, "reward.answer_pattern", "whole responses"),
        ({"kind": "exact_match", "url": "https://host/"}, "reward.url", "is set, but reward.kind is exact_match"),
        ({"kind": "model"}, "reward.path", "is missing, and reward.kind is model"),
        ({"kind": "model", "path": "a/b", "train": TRAIN}, "reward.train", "is set, and so is reward.path"),
        ({"kind": "exact_match", "train": TRAIN}, "reward.train", "is set, but reward.kind is exact_match"),
        ({"kind": "model", "train": TRAIN, "revision": "main"}, "reward.revision", "only a hub name has revisions"),
        (
            {"kind": "model", "train": {"preferences": "none.jsonl"}},
            "reward.train.preferences",
            "'none.jsonl': does not exist. Name a file with the columns chosen and rejected, or answers",
        ),
        (
            [EXACT, {"kind": "model", "train": TRAIN | {"model": "none"}}],
            "reward.parts.1.train.model",
            "it has no config.json",
        ),
        ([EXACT, {"kind": "model", "path": "nowhere"}], "reward.parts.1.path", "has no config.json that can be read"),
    ],
)
def test_what_is_wrong_with_one_of_them_is_said_with_its_place(
    job: dict[str, Any], reward: Any, field: str, words: str
) -> None:
    (problem,) = said(job, reward)
    assert problem.startswith(f"{field}: "), problem
    assert words in problem


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ([EXACT | {"name": "no spaces"}], "reward.parts.0.name"),
        ([EXACT | {"wieght": 1}], "Did you mean 'reward.parts.0.weight'?"),
        ([EXACT | {"weight": "1"}], "reward.parts.0.weight"),
    ],
)
def test_wrong_keys_and_types_are_said_with_their_place(job: dict[str, Any], reward: Any, words: str) -> None:
    with pytest.raises(ConfigError) as found:
        job_from_mapping(job | {"reward": reward})
    assert words in str(found.value)


def test_a_reward_model_may_be_trained_and_its_files_lie_beside_the_job(job: dict[str, Any], tmp_path: Path) -> None:
    assert said(job, {"kind": "model", "train": TRAIN}) == []
    (tmp_path / "prefs.jsonl").write_text("")
    file = tmp_path / "job.yaml"
    reward = {"kind": "model", "train": {"preferences": "prefs.jsonl", "lr": 1e-3}}
    file.write_text(yaml.safe_dump(job | {"reward": [EXACT, reward]}))
    (_, loaded) = load_job(file).reward.parts
    assert loaded.train is not None and loaded.train.preferences == str(tmp_path / "prefs.jsonl")
    (tmp_path / "answers").write_text("whatever lies there")
    file.write_text(yaml.safe_dump(job | {"reward": [EXACT, {"kind": "model", "train": TRAIN}]}))
    (_, loaded) = load_job(file).reward.parts
    assert loaded.train is not None and loaded.train.preferences == "answers"
    with pytest.raises(ConfigError, match=r"Did you mean 'reward\.parts\.1\.train\.held_out'"):
        job_from_mapping(job | {"reward": [EXACT, {"kind": "model", "train": TRAIN | {"heldout": 0.1}}]})


@pytest.mark.parametrize("place", ["path", "train.model"])
@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"pytorch_model.bin": b"a pickle"}, "has its weights in pytorch_model.bin alone"),
        ({"model.safetensors": b"12345678"}, "cut short"),
        ({}, "has no weights"),
        ({"model.safetensors": b"\x02" + b"\0" * 7 + b"{}", "pytorch_model.bin": b"x"}, "its header cannot be read"),
    ],
)
def test_weights_of_a_reward_model_that_cannot_be_read_are_refused_by_the_check(
    job: dict[str, Any], tmp_path: Path, place: str, weights: dict[str, bytes], words: str
) -> None:
    model = tmp_path / "rm"
    model.mkdir()
    (model / "config.json").write_text('{"num_labels": 1}')
    (model / "tokenizer.json").write_text("{}")
    for name, content in weights.items():
        (model / name).write_bytes(content)
    named = {"path": str(model)} if place == "path" else {"train": TRAIN | {"model": str(model)}}
    (problem,) = said(job, {"kind": "model"} | named)
    assert problem.startswith(f"reward.{place}: ") and words in problem


def test_a_column_that_one_function_lacks_is_said_of_that_one(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "narrow_part.py").write_text("def score(prompt, response, answer, level): return 1.0\n")
    (problem,) = said(job, [EXACT, {"kind": "function", "function": "narrow_part:score"}])
    assert problem.startswith("reward.parts.1.function: narrow_part:score (line 1) needs 'level'")
