"""Simulations catch bugs: each planted one is found by some seed, and only because it was planted."""

from __future__ import annotations

import functools

import pytest

from configs.scenario import Scenario
from supervisors.simulation.runner import simulate
from tests.supervisors.simulation.planted_bugs import FOCUS, LIMITS, PLANTED, SEEDS
from tests.supervisors.simulation.scenarios import chaos

SEEDS_MAX = 60


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


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_caught_by_some_seed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = scenario_for(name)
    said: list[str] = []
    with monkeypatch.context() as patch:
        PLANTED[name](patch.setattr)
        for seed in (SEEDS[name], *range(SEEDS_MAX)):
            said.clear()
            if simulate(scenario, seed, said.append).violations:
                break
        else:
            pytest.fail(f"{SEEDS_MAX} seeds did not notice it")
    misfits = [line for line in said if "TypeError(" in line or "AttributeError(" in line]
    assert misfits == [], "the planted function no longer fits the code that it replaces, which is no proof"
    assert without_bug(scenario, seed) == [], f"seed {seed} fails without the bug as well"


@functools.cache
def _without_bug(scenario: str, seed: int) -> list[str]:
    return simulate(Scenario.model_validate_json(scenario), seed).violations


def without_bug(scenario: Scenario, seed: int) -> list[str]:
    """Violations; most bugs are caught by one of a few seeds."""
    return _without_bug(scenario.model_dump_json(), seed)
