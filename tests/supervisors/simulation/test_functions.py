"""Functions in a simulated cluster: the controller and the book of a live job, under faults and virtual time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from configs.scenario import Scenario, load_scenario
from supervisors.pool.functions import Functions
from supervisors.simulation.runner import simulate
from tests.supervisors.simulation.scenarios import ROOT, scenario

FILE = ROOT / "configs" / "functions.yaml"
JOB: dict[str, Any] = {
    "name": "a", "steps": 4, "workers": 0, "workers_max": 3, "functions": True, "place_rollout": "elastic",
    "prompts": 6, "prompts_per_step": 3, "policy": "planned", "length_ranking": "history",
}  # fmt: skip


def with_faults(*plan: dict[str, Any], **job: Any) -> Scenario:
    limits = {"function_start_s": 5.0}
    return scenario(jobs=[JOB | job], faults={"plan": list(plan)}, limits=limits)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What all lives of the head have recorded of functions: name, and the function."""
    noted: list[tuple[str, str]] = []
    init = Functions.__init__

    def noting(self: Functions, *arguments: Any, **keywords: Any) -> None:
        init(self, *arguments, **keywords)
        news = self._news

        def recorded(name: str, **fields: Any) -> None:
            noted.append((name, fields["node"]))
            news.record(name, **fields)

        self._news = SimpleNamespace(say=news.say, record=recorded, subscribe=news.subscribe)

    monkeypatch.setattr(Functions, "__init__", noting)
    return noted


@pytest.mark.parametrize("seed", range(6))
def test_whatever_strikes_functions_and_the_head_that_starts_them_the_run_keeps_every_promise(seed: int) -> None:
    outcome = simulate(load_scenario(FILE), seed)
    assert outcome.violations == [], "\n".join([*outcome.faults, *outcome.violations, outcome.report])


def test_a_life_of_the_head_that_dies_as_functions_start_leaves_them_to_the_next_one(
    events: list[tuple[str, str]],
) -> None:
    """Killed before any of them can have joined; no name is ordered twice, and none is given up."""
    outcome = simulate(with_faults({"kind": "kill", "target": {"role": "head"}, "at_s": 0.05}, idle_s=100.0), 3)
    assert outcome.violations == [] and outcome.faults, outcome.report
    assert events == simulate_again(events), "equal seeds, equal events"
    ordered = [node for name, node in events if name == "function_ordered"]
    assert ordered == ["f0", "f1", "f2"]
    assert not [node for name, node in events if name == "function_missing"]


def test_a_life_of_the_head_that_dies_at_work_leaves_its_functions_to_the_next_one(
    events: list[tuple[str, str]],
) -> None:
    """All of them work on, though the next life's scheduler knows no plan; none is lost, and none ordered besides."""
    strike = {"kind": "kill", "target": {"role": "head"}, "at_s": 4.0}
    long: dict[str, Any] = {"steps": 1, "idle_s": 2.0, "decode_s": 0.3, "mean_tokens": 30, "by_prompt": 0.9}
    outcome = simulate(with_faults(strike, plan={"choose": "fixed"}, **long), 3)
    assert outcome.violations == [] and outcome.faults, outcome.report
    ordered = [node for name, node in events if name == "function_ordered"]
    assert ordered == ["f0", "f1", "f2"]
    assert not [node for name, node in events if name in ("function_missing", "function_ended")]


def simulate_again(events: list[tuple[str, str]]) -> list[tuple[str, str]]:
    first = list(events)
    events.clear()
    simulate(with_faults({"kind": "kill", "target": {"role": "head"}, "at_s": 0.05}, idle_s=100.0), 3)
    assert events == first
    return first


def test_a_head_whose_machine_loses_its_power_begins_anew_with_functions_when_it_is_resumed(
    events: list[tuple[str, str]],
) -> None:
    strike = {"kind": "kill", "target": {"node": "head"}, "after_step": 1, "at_s": 0.0}
    outcome = simulate(with_faults(strike, checkpoint_every=1), 5)
    assert outcome.violations == [] and outcome.faults, outcome.report
    assert [node for name, node in events if name == "function_ordered"].count("f0") == 2


def test_functions_are_refused_for_jobs_side_by_side() -> None:
    with pytest.raises(ValidationError, match=r"jobs_at_once: \[1\], since a has functions"):
        scenario(jobs=[JOB, JOB | {"name": "b"}])
