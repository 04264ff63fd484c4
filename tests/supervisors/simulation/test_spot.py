"""Machines of a trace in a simulated cluster: the same provider protocol, pool and supervisors as live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.fleet.scope import JobScope
from configs.limits import DEFAULT_LIMITS
from configs.scenario import Scenario, load_scenario
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


def test_a_trace_is_found_beside_the_scenario_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("at_s,node,event,kind\n1,a,up,spot\n")
    (tmp_path / "s.yaml").write_text("name: s\njobs: [{name: a}]\nspot: {trace: mine.csv}\n")
    assert load_scenario(tmp_path / "s.yaml").spot.trace == str(tmp_path / "mine.csv")


def test_a_task_of_the_world_that_fails_is_a_violation(tmp_path: Path) -> None:
    """Else a replay that could not read its trace would count as a run without one, and as a success."""
    outcome = simulate(on_trace(tmp_path / "nowhere.csv"), 1)
    assert any("replay of the spot trace" in sentence for sentence in outcome.violations), told(outcome)


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


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the scheduler has recorded, each with its time."""
    rows: list[dict[str, Any]] = []
    record = JobScope.record

    def noting(self: JobScope, name: str, **fields: Any) -> None:
        rows.append(fields | {"event": name, "at_s": self.ctx.now()})
        record(self, name, **fields)

    monkeypatch.setattr(JobScope, "record", noting)
    return rows


def test_with_notice_a_machine_works_until_shortly_before_its_end_and_hands_over_in_time(
    tmp_path: Path, recorded: list[dict[str, Any]]
) -> None:
    """Its responses take a minute, and its notice is twenty seconds long."""
    path = tmp_path / "notice.csv"
    path.write_text("at_s,node,event,kind\n0,n,up,spot\n20,n,notice,spot\n40,n,kill,spot\n")
    job = JOB | {
        "steps": 2,
        "max_tokens": 128,
        "mean_tokens": 500.0,
        "max_running": 8,
        "prompts_per_step": 8,
        "group_size": 4,
    }
    slow = {"engine_step_s": 0.5, "micro_batch_s": 0.02, "train_step_s": 0.2, "load_s": 0.3}
    outcome = simulate(scenario(jobs=[job], slots=1, spot={"trace": str(path)}, costs=slow), 3)
    assert outcome.violations == [], told(outcome)
    [draining] = [row for row in recorded if row["event"] == "worker_draining"]
    [leaving] = [row for row in recorded if row["event"] == "worker_leaving"]
    assert (draining["worker"], leaving["worker"]) == ("rollout-n", "rollout-n")
    assert draining["samples"] > 0
    hand_over_s = DEFAULT_LIMITS.hand_over_s
    assert 20 - hand_over_s <= leaving["at_s"] - draining["at_s"] < 20
    taken = [row for row in recorded if row["event"] == "samples_taken_back"]
    assert taken and taken[-1]["left_s"] == pytest.approx(hand_over_s, abs=0.1)
    assert not [row for row in recorded if row["event"] == "samples_returned" and row["worker"] == "rollout-n"], (
        "it has handed everything back itself"
    )
