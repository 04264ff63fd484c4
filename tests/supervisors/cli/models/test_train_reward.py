"""``headrace train-reward``: its last line with --json, what it says meanwhile, and bad input in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from supervisors.cli.app import app
from tests.reward_model import save_reward_model


@pytest.fixture(autouse=True)
def project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    write("prefs.jsonl", [{"prompt": f"{n}=", "chosen": f"{n}!", "rejected": f"{n}?"} for n in range(60)])
    save_reward_model(tmp_path / "base", head=False)
    return tmp_path


def write(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(*arguments: str, preferences: str = "prefs.jsonl", model: str = "base") -> Result:
    common = ("train-reward", preferences, "--model", model, "--device", "cpu")
    return CliRunner().invoke(app, [*common, *arguments])


def test_with_json_stdout_is_the_result_and_stderr_tells_of_the_accuracy(project: Path) -> None:
    result = train("--json", "--lr", "0.01", "--steps", "20", "--held-out", "0.2", "--batch-pairs", "8")
    assert result.exit_code == 0, result.output
    ended = json.loads(result.stdout)
    assert {"accuracy_held_out", "steps", "path"} <= ended.keys()
    assert (ended["steps"], ended["path"]) == (20, str(project / "reward-model"))
    assert "2 of 20 steps  loss" in result.stderr and "held-out accuracy" in result.stderr
    assert (project / "reward-model" / "model.safetensors").is_file()
    again = train()
    assert (again.exit_code, "something is there already" in again.stderr) == (2, True)


@pytest.mark.parametrize(
    ("rows", "arguments", "words"),
    [
        ([{"chosen": "a"}], [], "PREFERENCES bad.jsonl, row 0 (line 1): no column 'rejected'; the row has chosen"),
        ([{"chosen": "a", "rejected": "a"}], [], "chosen and rejected are equal"),
        ([], [], "PREFERENCES bad.jsonl: it has no rows"),
        (
            [{"chosen": "a", "rejected": "b"}],
            [],
            "--held-out 0.05: of 1 pairs, which have 1 prompts, there are none held out",
        ),
        ([{"chosen": "a", "rejected": "b"}], ["--held-out", "1.5"], "--held-out"),
        ([{"chosen": "a", "rejected": "b"}], ["--batch-pairs", "0"], "--batch-pairs"),
        ([{"chosen": "a", "rejected": "b"}], ["--device", "tpu"], "--device tpu: expected auto, cpu or cuda"),
        (
            [{"chosen": "a", "rejected": "b"}],
            ["--max-tokens", "9999"],
            "--max-tokens 9999: the model in base takes 128",
        ),
        ([{"chosen": "a", "rejected": "b"}], ["--model", "gone"], "--model gone: there is no such directory"),
        ([{"chosen": "a", "rejected": "b"}], ["--model", "three"], "--model three: it has 3 labels"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    rows: list[dict[str, Any]], arguments: list[str], words: str, project: Path
) -> None:
    save_reward_model(project / "three", labels=3)
    write("bad.jsonl", rows)
    result = train(*arguments, preferences="bad.jsonl")
    assert result.exit_code == 2, result.output
    assert words in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert not (project / "reward-model").exists() and not list(project.glob("*.partial"))


def test_a_loss_that_is_no_number_is_exit_code_1(project: Path) -> None:
    result = train("--lr", "1e30", "--held-out", "0.2")
    assert (result.exit_code, "lower the learning rate" in result.stderr) == (1, True)
    assert not (project / "reward-model").exists()
