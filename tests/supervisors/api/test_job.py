"""Whatever a program calls a job becomes the same JobConfig, or an error that names field and fix."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.errors import ConfigError
from configs.schema import JobConfig
from supervisors.api.job import folders_of, job_of, name_of

REWARD = "def score(prompt, response, answer, **columns):\n    return 1.0\n"


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A job as a map, in a folder with its prompts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "2 + 3 =", "answer": "5"}\n')
    return {
        "name": "arithmetic",
        "steps": 3,
        "model": {"source": "tiny"},
        "data": {"path": "prompts.jsonl"},
        "reward": {"kind": "exact_match"},
    }


@pytest.fixture
def rewards(tmp_path: Path, plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of the user's, imported from a folder that only this program knows of."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "my_api_rewards.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(folder))
    import my_api_rewards  # pyright: ignore[reportMissingImports]

    monkeypatch.setitem(sys.modules, "my_api_rewards", my_api_rewards)
    return my_api_rewards


def test_a_file_a_preset_a_map_and_a_model_are_all_jobs(plain: dict[str, Any]) -> None:
    Path("job.yaml").write_text(yaml.safe_dump(plain))
    jobs = [job_of(source, {"steps": 9}, None) for source in ("job.yaml", Path("job.yaml"), plain)]
    jobs.append(job_of(JobConfig.model_validate(plain), {"steps": 9}, None))
    assert [(job.name, job.steps, job.data.path) for job in jobs] == [
        ("arithmetic", 9, str(Path("prompts.jsonl").resolve()))
    ] * 4
    assert job_of("quickstart", {"rollout.workers": 3}, None).rollout.workers == 3
    assert plain["steps"] == 3


@pytest.mark.parametrize(
    ("section", "settings", "said"),
    [
        ({"steps": "many"}, None, "job: steps: "),
        ({"rollout": {"wokers": 3}}, None, "rollout.wokers: there is no such key. Did you mean 'rollout.workers'?"),
        ({}, {"rollout.workers": 2.5}, "--set rollout.workers=2.5: rollout.workers: 2.5 is not allowed"),
        ({}, {"rollout.workers": object()}, "settings: rollout.workers: <object"),
        ({"data": {"path": "gone.jsonl"}}, None, "data.path: "),
    ],
)
def test_a_wrong_job_is_refused_with_the_field_and_what_to_do(
    section: dict[str, Any], settings: dict[str, Any] | None, said: str, plain: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as refused:
        job_of(plain | section, settings, None)
    assert said in str(refused.value)


def test_a_reward_function_is_given_as_an_object_wherever_a_job_names_one(
    plain: dict[str, Any], rewards: types.ModuleType, tmp_path: Path
) -> None:
    given = [
        job_of(plain, None, rewards.score),
        job_of(plain | {"reward": rewards.score}, None, None),
        job_of(plain | {"reward": {"kind": "function", "function": rewards.score, "timeout_s": 5}}, None, None),
        job_of(plain, {"reward.kind": "function", "reward.function": rewards.score}, None),
    ]
    assert {(job.reward.kind, job.reward.function) for job in given} == {("function", "my_api_rewards:score")}
    assert folders_of(given[0]) == str((tmp_path / "mine").resolve())
    assert folders_of(job_of(plain, None, None)) is None


def test_all_code_that_a_job_names_is_found_from_where_the_program_would_import_it(
    plain: dict[str, Any], rewards: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a reward, an environment and its tools, imported by the program or not yet."""
    for name in ("games", "tools"):
        (tmp_path / name / f"my_{name}").mkdir(parents=True)
        monkeypatch.syspath_prepend(str(tmp_path / name))
    game = "class Game:\n    def reset(self, row): ...\n    def step(self, answer): ...\n"
    (tmp_path / "games" / "my_games" / "__init__.py").write_text(game)
    (tmp_path / "tools" / "my_tools" / "search.py").write_text("def search(query: str): ...")
    environment = {"kind": "python", "path": "my_games:Game", "tools": ["my_tools.search:search"]}
    played = job_of({**plain, "reward": {}, "environment": environment}, None, None)
    assert folders_of(played) == os.pathsep.join(str((tmp_path / name).resolve()) for name in ("games", "tools"))
    parts = [{"kind": "exact_match"}, {"kind": "function", "function": "my_api_rewards:score", "name": "mine"}]
    assert folders_of(job_of({**plain, "reward": parts}, None, None)) == str((tmp_path / "mine").resolve())


def test_a_reward_function_that_no_process_can_import_is_refused_with_what_to_do() -> None:
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(REWARD, cell)  # as a notebook's cell does

    def inner(prompt: str, response: str, answer: str) -> float:
        return 1.0

    for function in (cell["score"], inner, lambda *_: 1.0, len):
        with pytest.raises(ConfigError) as refused:
            name_of(function)
        assert "reward.function" in str(refused.value)
        assert "Write it into a file beside the notebook, such as rewards.py" in str(refused.value)
