"""``headrace check`` finds what ``headrace run`` would refuse, else says what would run, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from configs.loader import load_job
from configs.presets import preset_names, scenario_names
from supervisors.cli.app import app
from supervisors.cli.looking.check import what_would_run
from tests.smallest_job import smallest_job


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


def test_every_part_of_a_job_is_told_by_what_it_will_be() -> None:
    said = invoke(
        "check", "episodes", "--set", "model.adapter.rank=4",
        "--set", "rollout.device=cpu", "--set", "trainer.device=cpu",
        "--set", "eval={data: {source: jsonl, path: data/guess_number.jsonl}, every: 5, prompts: 8, samples: 2}",
    ).stdout  # fmt: skip
    for line in (
        "model       made on the spot: 2 layers of width 64, shown examples of the environment for 200 steps, float32",
        "adapter     rank 4, alpha 32, on all-linear; the model itself stays as it is",
        "environment python actors.environments.examples.guess_number:GuessNumber, at most 4 turns, 160 tokens, 60 s",
        "reward      from the environment",
        "evaluation  first, every 5 steps, and last: 8 prompts x 2 samples of jsonl ",
        "devices     none are used",
    ):
        assert line in said
    assert "critic" not in said


def test_a_critic_that_begins_as_a_reward_model_is_not_called_the_policy() -> None:
    job = smallest_job(algorithm={"name": "ppo"}, critic={"reward": "learned", "warmup_steps": 2})
    assert (
        what_would_run(job)["critic"] == "the model of reward learned, learning rate 1e-05, trained alone for 2 steps"
    )
    plain = what_would_run(smallest_job(algorithm={"name": "ppo"}))
    assert plain["critic"] == "the policy with a new head, learning rate 1e-05"
    assert "environment" not in plain and "machines" not in plain


def test_machines_that_a_provider_brings_are_told() -> None:
    job = smallest_job(provider={"kind": "slurm", "nodes_max": 3, "slots": 2}, cluster={"place_rollout": "elastic"})
    assert what_would_run(job)["machines"] == "from provider slurm, at most 3, 2 workers each"


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
    assert all(name in refused for name in preset_names()) and "chaos" not in preset_names()
    assert invoke("check", "../quickstart").exit_code == 2


def test_a_folder_with_the_name_of_a_preset_does_not_stand_in_its_way(tmp_path: Path) -> None:
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "mine").mkdir()
    assert load_job("quickstart").name == "quickstart"
    refused = invoke("check", "mine")
    assert refused.exit_code == 2 and "mine: is a directory. Name a file in it" in refused.stderr


def test_a_scenario_is_no_job_and_a_job_no_scenario_and_each_says_which_command_is_meant() -> None:
    refused = invoke("run", "chaos")
    assert refused.exit_code == 2 and "Run `headrace simulate chaos`, or name a job: async, " in refused.stderr
    refused = invoke("simulate", "quickstart")
    assert refused.exit_code == 2 and "quickstart.yaml`, or name a scenario: chaos, " in refused.stderr
    refused = invoke("simulate", "caos")
    assert "name a preset: chaos, " in refused.stderr and "async" not in refused.stderr
    jobs, scenarios = set(preset_names()), set(scenario_names())
    assert {"quickstart", "rlhf", "cluster"} <= jobs and {"chaos", "planned", "functions"} <= scenarios
    assert not jobs & scenarios


def test_the_version_is_told() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.stdout.startswith("headrace 0.")) == (0, True)


def test_completion_can_be_installed() -> None:
    assert "--install-completion" in invoke("--help").stdout
