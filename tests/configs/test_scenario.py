"""Scenario files: the one that comes along, and what is said about wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.loader import job_from_mapping
from configs.scenario import Scenario, job_config, load_scenario

CONFIGS = Path(__file__).parents[2] / "configs"


def test_the_chaos_scenario_has_sync_and_async_jobs_alone_and_three_at_a_time() -> None:
    chaos = load_scenario(CONFIGS / "chaos.yaml")
    assert {job.mode for job in chaos.jobs} == {"sync", "async"}
    assert set(chaos.jobs_at_once) == {1, 3}
    assert {(variant.ranks or 1, variant.tensor_parallel or 1) for variant in chaos.variants} >= {(2, 1), (3, 2)}
    assert chaos.faults.random is not None
    assert chaos.faults.random.faults == (3, 10)
    assert {"head", "trainer", "rollout", "weights", "rewards", "node", "rank"} == set(chaos.faults.random.roles)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: x\njobs: []\n", "x.yaml:2: jobs: [] is not allowed"),
        ("name: x\njobs:\n  - {name: a}\n  - {name: a}\n", "jobs with different names; found a more than once"),
        ("name: x\njobs: [{name: a}]\njobs_at_once: [2]\n", "jobs_at_once of at most 1, as many as there are jobs"),
        ("name: x\njobs:\n  - {name: a, stepps: 3}\n", "x.yaml:3: jobs.0.stepps: there is no such key"),
        (
            "name: x\njobs: [{name: a, service: s}]\n",
            "jobs whose service is one of none, as there are no services; a has s",
        ),
        (
            "name: x\njobs: [{name: a}]\nservices: {services: [{name: s, memory_bytes: 9}]}\n",
            "services with backend: simulated; s has another one",
        ),
        ("name: x\njobs: [{name: a}]\nfaults:\n  random: {faults: [5, 2]}\n", "faults as [fewest, most]; found [5, 2]"),
        (
            "name: x\njobs: [{name: a}]\nfaults:\n  plan:\n    - {kind: kil, target: {name: a}}\n",
            'x.yaml:5: faults.plan.0.kind: "kil" is not one of kill',
        ),
    ],
)
def test_a_wrong_scenario_is_told_with_line_field_and_fix(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_scenario(file)
    assert said in str(caught.value)


@pytest.mark.parametrize(("name", "modes"), [("seeding", {"sync", "minibatch", "dynamic"}), ("combined", {"async"})])
def test_the_scenarios_with_a_seeding_window_have_jobs_with_and_without_other_workers(
    name: str, modes: set[str]
) -> None:
    seeding = load_scenario(CONFIGS / f"{name}.yaml")
    assert all(job.seeding for job in seeding.jobs)
    assert {job.place_rollout for job in seeding.jobs} == {"elastic", "local"}
    assert {job.mode for job in seeding.jobs} == modes


@pytest.mark.parametrize(
    "name", ["chaos", "critic", "seeding", "combined", "functions", "planned", "shared_trainer", "episodes_sim"]
)
def test_the_jobs_of_a_scenario_pass_the_checks_of_real_job_files(name: str, tmp_path: Path) -> None:
    chaos = load_scenario(CONFIGS / f"{name}.yaml")
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_text("{}")
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1", "answer": "1"}\n')
    for simulated in chaos.jobs:
        job = job_config(simulated, chaos, model_path=str(tmp_path), data_path=str(data), seed=1)
        assert job_from_mapping(job.model_dump(mode="json")) == job


def test_what_is_not_said_has_a_meaning() -> None:
    scenario = Scenario.model_validate({"name": "x", "jobs": [{"name": "a"}]})
    assert (scenario.faults.plan, scenario.faults.random, scenario.jobs_at_once) == ([], None, [])
