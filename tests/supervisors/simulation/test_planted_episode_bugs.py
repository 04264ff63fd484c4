"""Simulations catch bugs of episodes: some seed finds each, and only because it was planted."""

from __future__ import annotations

import pytest

from configs.scenario import Scenario, load_scenario
from tests.supervisors.simulation.catching import assert_caught
from tests.supervisors.simulation.planted_episode_bugs import PLANTED, SEEDS, THE_HEAD_DIES
from tests.supervisors.simulation.scenarios import EPISODES_FILE

QUICK = ("a_replay_is_sampled_anew", "what_a_dead_environment_drove_is_forgotten")


def scenario_for(name: str) -> Scenario:
    scenario = load_scenario(EPISODES_FILE)
    if name not in THE_HEAD_DIES:
        return scenario
    jobs = [job.model_dump() for job in scenario.jobs if job.name == "plain"]
    drawn = {"faults": [8, 12], "kinds": ["kill"], "roles": ["head"], "within_s": 25.0, "at_messages": 0.9}
    changes = {"jobs": jobs, "jobs_at_once": [], "faults": {"random": drawn}}
    return Scenario.model_validate(scenario.model_dump() | changes)


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_bug_of_episodes_is_caught_by_some_seed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(PLANTED[name], scenario_for(name), SEEDS[name], monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in PLANTED if name not in QUICK])
def test_each_other_planted_bug_of_episodes_is_caught_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(PLANTED[name], scenario_for(name), SEEDS[name], monkeypatch)
