"""Simulations catch bugs of planned generation: some seed finds each, and only because it was planted."""

from __future__ import annotations

import pytest

from configs.scenario import Scenario, load_scenario
from tests.supervisors.simulation.catching import assert_caught
from tests.supervisors.simulation.planted_plan_bugs import NODES_GO, PLANTED, SEEDS
from tests.supervisors.simulation.scenarios import PLANNED_FILE

QUICK = ("the_longest_part_is_cut_like_any_other", "nobody_is_woken_for_what_is_anybodys")


def scenario_for(name: str) -> Scenario:
    scenario = load_scenario(PLANNED_FILE)
    if name not in NODES_GO:
        return scenario
    alone = {
        "workers": 0,
        "place_rollout": "elastic",
        "workers_max": 4,
        "steps": 6,
        "mean_tokens": 30,
        "max_tokens": 40,
    }
    jobs = [job.model_copy(update=alone) for job in scenario.jobs if job.name == "cheap"]
    faults = {"plan": [{"kind": "kill", "target": {"node": "node-1"}, "after_step": 2, "at_s": 1.5}]}
    changes = {"jobs": [job.model_dump() for job in jobs], "jobs_at_once": [], "node_returns_s": None, "faults": faults}
    return Scenario.model_validate(scenario.model_dump() | changes)


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_bug_of_planned_generation_is_caught_by_some_seed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(PLANTED[name], scenario_for(name), SEEDS[name], monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in PLANTED if name not in QUICK])
def test_each_other_planted_bug_of_planned_generation_is_caught_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(PLANTED[name], scenario_for(name), SEEDS[name], monkeypatch)
