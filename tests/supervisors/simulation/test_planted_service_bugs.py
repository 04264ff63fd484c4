"""Simulations catch bugs of shared training services: some seed finds each, and only because it was planted."""

from __future__ import annotations

import pytest

from configs.scenario import Scenario, load_scenario
from tests.supervisors.simulation.catching import assert_caught
from tests.supervisors.simulation.planted_service_bugs import CROWDED, FOCUS, PLANTED, SEEDS
from tests.supervisors.simulation.scenarios import SHARED_FILE

QUICK = ("a_trainer_keeps_to_a_life_of_its_service_that_is_gone", "another_job_comes_into_a_burst")


def crowded(scenario: Scenario) -> Scenario:
    """All jobs are on one service, which has room for one state, and whose bursts end soon."""
    services = scenario.services
    assert services is not None
    first = services.services[0]
    queue = first.queue.model_copy(update={"gap_s": 0.1, "starvation_s": 1.0})
    narrow = first.model_copy(update={"memory_bytes": 2400, "queue": queue})
    services = services.model_copy(update={"services": [narrow, *services.services[1:]]})
    return scenario.model_copy(update={"services": services, "variants": []})


def scenario_for(name: str) -> Scenario:
    scenario = load_scenario(SHARED_FILE)
    if name in CROWDED:
        scenario = crowded(scenario)
    assert scenario.faults.random is not None
    drawn = scenario.faults.random.model_copy(update=FOCUS.get(name, {}))
    return scenario.model_copy(update={"faults": scenario.faults.model_copy(update={"random": drawn})})


def test_there_are_enough_of_them() -> None:
    assert len(PLANTED) >= 12


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_bug_of_a_training_service_is_caught_by_some_seed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(PLANTED[name], scenario_for(name), SEEDS[name], monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in PLANTED if name not in QUICK])
def test_each_other_planted_bug_of_a_training_service_is_caught_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(PLANTED[name], scenario_for(name), SEEDS[name], monkeypatch)
