"""``headrace new`` writes a job file that the checks of a run accept, and ``headrace schema`` describes all keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from configs.loader import load_job, schema_keys
from supervisors.cli import new as new_command
from supervisors.cli.app import app
from supervisors.cli.looking.check import job_schema


def invoke(*arguments: str, answers: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=answers)


@pytest.fixture(autouse=True)
def project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"question": "2+2=", "solution": "4", "level": 1}\n')
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "dataset_info.json").write_text(json.dumps({"features": {"prompt": {}, "label": {}}}))
    (tmp_path / "rewards.py").write_text("def score(prompt, response, answer, **columns): return 1.0\n")
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "pytorch_model.bin"):
        (tmp_path / "model" / name).write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("model", "data", "reward", "expected"),
    [
        ("tiny", "spell_backward", "reasoning_gym", {"source": "reasoning_gym", "task": "spell_backward"}),
        ("tiny", "rows.jsonl", "exact_match", {"prompt_key": "question", "answer_key": "solution"}),
        ("model", "set", "exact_match", {"source": "hf_dataset", "answer_key": "label"}),
        ("model", "rows.jsonl", "rewards:score", {"source": "jsonl"}),
    ],
)
def test_the_file_that_is_written_passes_the_check(
    model: str, data: str, reward: str, expected: dict[str, Any]
) -> None:
    made = invoke("new", "my-job.yaml", "--model", model, "--data", data, "--reward", reward)
    assert made.exit_code == 0, made.output
    assert expected.items() <= yaml.safe_load(Path("my-job.yaml").read_text())["data"].items()
    assert load_job("my-job.yaml").name == "my-job"
    checked = invoke("check", "my-job.yaml")
    assert checked.exit_code == 0, checked.output


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("https://scorer.lab:8000/score", {"kind": "http", "url": "https://scorer.lab:8000/score"}),
        ("judge", {"kind": "model", "path": "judge"}),
        ("rewards:score", {"kind": "function", "function": "rewards:score"}),
    ],
)
def test_the_kind_of_a_reward_follows_from_what_is_named(reward: str, expected: dict[str, Any], project: Path) -> None:
    (project / "judge").mkdir()
    (project / "judge" / "config.json").write_text('{"id2label": {"0": "LABEL_0"}}')
    (project / "judge" / "tokenizer.json").write_text("{}")
    header = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    (project / "judge" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    made = invoke("new", "my-job.yaml", "--model", "tiny", "--data", "rows.jsonl", "--reward", reward)
    assert made.exit_code == 0, made.output
    assert yaml.safe_load(Path("my-job.yaml").read_text())["reward"] == expected


def test_on_a_terminal_it_asks_and_proposes_the_reward_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def prompt(question: str, default: str) -> str:
        asked.append((question.partition(":")[0], default))
        return default

    monkeypatch.setattr(new_command.typer, "prompt", prompt)
    monkeypatch.setattr(new_command.sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    new_command.new()
    assert asked == [("Model", "tiny"), ("Data", "spell_backward"), ("Reward", "reasoning_gym")]
    assert load_job("job.yaml").reward.kind == "reasoning_gym"


def test_what_is_wrong_is_said_with_the_field_and_nothing_is_written_or_overwritten(project: Path) -> None:
    for arguments, said in (
        (["--model", "tiny", "--data", "rows.jsonl", "--reward", "rewards:scores"], "Did you mean rewards:score?"),
        (["--model", "tiny", "--data", "spell_bakward", "--reward", "reasoning_gym"], "Did you mean 'spell_backward'?"),
        (["--model", "nowhere", "--data", "rows.jsonl", "--reward", "exact_match"], "model.path"),
        (["--data", "rows.jsonl", "--reward", "exact_match"], "--model is missing"),
    ):
        result = invoke("new", *arguments)
        assert (result.exit_code, said in result.stderr) == (2, True), result.output
        assert not (project / "job.yaml").exists()
    (project / "job.yaml").write_text("mine")
    assert "exists already" in invoke("new").stderr
    assert (project / "job.yaml").read_text() == "mine"


def test_the_schema_has_every_key_with_what_it_means_and_fits_the_presets() -> None:
    printed = json.loads(invoke("schema").stdout)
    assert printed == job_schema()
    sections = {name.rpartition("/")[2] for name in printed["$defs"]}
    assert {"TrainerConfig", "Limits"} <= sections
    for key in schema_keys():
        section = printed
        *names, last = key.split(".")
        for name in names:
            either = section["properties"][name]
            section = printed["$defs"][either.get("anyOf", [either])[0]["$ref"].rpartition("/")[2]]
        assert last in section["properties"], key
        assert section["additionalProperties"] is False
        if not names:
            continue
        assert section["properties"][last].get("description"), f"{key} is not explained"
