"""Simulations catch bugs: each planted one is found by some seed, and only because it was planted."""

from __future__ import annotations

import pytest

from configs.scenario import Scenario
from tests.supervisors.simulation.catching import assert_caught
from tests.supervisors.simulation.planted_bugs import FOCUS, LIMITS, PLANTED, SEEDS
from tests.supervisors.simulation.scenarios import chaos


def scenario_for(name: str) -> Scenario:
    scenario = chaos()
    scenario = scenario.model_copy(update={"limits": scenario.limits.model_copy(update=LIMITS.get(name, {}))})
    if name not in FOCUS:
        return scenario
    assert scenario.faults.random is not None
    drawn = scenario.faults.random.model_copy(update=FOCUS[name])
    return scenario.model_copy(update={"faults": scenario.faults.model_copy(update={"random": drawn})})


def test_there_are_enough_of_them() -> None:
    assert len(PLANTED) >= 20


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_caught_by_some_seed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(PLANTED[name], scenario_for(name), SEEDS[name], monkeypatch)
