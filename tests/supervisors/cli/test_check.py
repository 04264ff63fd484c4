"""``headrace check`` finds what ``headrace run`` would refuse, else says what would run, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from configs.loader import load_job
from configs.presets import preset_names
from supervisors.cli.app import app


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_job_that_can_run_is_told_in_a_few_lines_and_nothing_is_written(tmp_path: Path) -> None:
    result = invoke("check", "quickstart", "--set", "steps=7", "--set", "trainer.lr_schedule=cosine")
    assert result.exit_code == 0, result.output
    for part in (
        "quickstart: 7 steps",
        "spell_backward",
        "grpo, 32 prompts x 8 samples = 256",
        "cosine",
        "runs/quickstart",
    ):
        assert part in result.stdout
    assert list(tmp_path.iterdir()) == []
    whole = json.loads(invoke("check", "quickstart", "--json").stdout)
    assert whole == load_job("quickstart").model_dump(mode="json")


def test_sources_and_rewards_are_told_with_their_weights(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2+2", "answer": "4"}\n')
    (tmp_path / "job.yaml").write_text(
        """
name: j
steps: 1
model: {source: tiny}
data:
  mix:
    - {name: sums, weight: 3, path: acme/sums, prompt_key: question}
    - {name: ours, path: rows.jsonl}
reward:
  - {kind: exact_match, name: right}
  - {kind: math_verify, weight: 0.5}
"""
    )
    said = invoke("check", "job.yaml").stdout
    assert "75 % sums: file acme/sums of the hub, which is asked when the run starts, column question" in said
    assert f"25 % ours: file {tmp_path / 'rows.jsonl'}, column prompt" in said
    assert "1 x right + 0.5 x math_verify" in said
    wrong = (tmp_path / "job.yaml").read_text().replace("kind: math_verify", "kind: reasoning_gym")
    (tmp_path / "job.yaml").write_text(wrong)
    assert (
        "job.yaml:11: reward.parts.1.kind: reasoning_gym scores its own tasks only"
        in invoke("check", "job.yaml").stderr
    )


def test_what_a_run_would_refuse_ends_with_code_2_and_the_same_words() -> None:
    wrong = ("quickstart", "--set", "rollout.wokers=1")
    checked, run = invoke("check", *wrong), invoke("run", *wrong)
    assert checked.exit_code == run.exit_code == 2
    assert checked.stderr == run.stderr
    assert "Did you mean 'rollout.workers'?" in checked.stderr


def test_a_fault_plan_is_held_against_the_job(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("faults: [{kind: kill, target: {role: rollout}, at_s: 1}]\n")
    assert "1 of" in invoke("check", "quickstart", "--faults", str(plan)).stdout
    plan.write_text("faults: [{kind: kil}]\n")
    assert invoke("check", "quickstart", "--faults", str(plan)).exit_code == 2


def test_presets_go_by_name_a_file_of_that_name_comes_first_and_the_message_lists_them(tmp_path: Path) -> None:
    assert load_job("quickstart") == load_job("configs/quickstart.yaml")
    own = load_job("quickstart", ["name=own", "steps=3"])
    (tmp_path / "quickstart").write_text(json.dumps(own.model_dump(mode="json")))
    assert load_job("quickstart").name == "own"
    refused = invoke("check", "quikstart").stderr
    assert all(name in refused for name in preset_names())
    assert invoke("check", "../quickstart").exit_code == 2


def test_the_version_is_told() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.stdout.startswith("headrace 0.")) == (0, True)


def test_completion_can_be_installed() -> None:
    assert "--install-completion" in invoke("--help").stdout
