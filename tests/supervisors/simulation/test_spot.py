"""Machines of a trace in a simulated cluster: the same provider protocol, pool and supervisors as live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.scenario import Scenario
from supervisors.simulation.runner import Outcome, simulate
from tests.supervisors.simulation.scenarios import ROOT, scenario

JOB: dict[str, Any] = {"name": "a", "steps": 12, "workers": 1, "place_rollout": "elastic", "max_running": 2}


def on_trace(path: Path, **changes: Any) -> Scenario:
    return scenario(jobs=[JOB | {"steps": 20}], slots=1, spot={"trace": str(path)}, **changes)


def test_a_job_on_the_machines_of_a_trace_finishes_and_keeps_every_promise() -> None:
    outcome = simulate(on_trace(ROOT / "configs" / "traces" / "three_nodes.csv"), 3)
    assert outcome.violations == [], told(outcome)
    again = simulate(on_trace(ROOT / "configs" / "traces" / "three_nodes.csv"), 3)
    assert again.hash == outcome.hash


@pytest.mark.parametrize("seed", range(4))
def test_machines_that_go_all_the_time_cost_no_sample_and_no_restart_budget(tmp_path: Path, seed: int) -> None:
    """Twenty kills within the restart window of two minutes, of which ten are allowed to others."""
    rows = ["at_s,node,event,kind"]
    lives = sorted((2.0 * i + life, f"n{i}", what) for i in range(20) for life, what in ((0.0, "up"), (3.0, "kill")))
    rows += [f"{at_s},{node},{what},spot" for at_s, node, what in lives]
    path = tmp_path / "churn.csv"
    path.write_text("\n".join(rows))
    outcome = simulate(on_trace(path), seed)
    assert outcome.violations == [], told(outcome)


def told(outcome: Outcome) -> str:
    return "\n".join([*outcome.faults, *outcome.violations, outcome.report])
