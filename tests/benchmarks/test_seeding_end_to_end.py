"""``headrace bench seeding`` on real processes, as short as it can be; and what it makes of its runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks._processes import ROOT
from benchmarks.jobs import seeding
from configs.loader import load_job
from supervisors.preparation.model_preparation import prepare_model
from supervisors.providers.trace_files import read_trace


def run_of(speed: float, lost: int = 0) -> dict[str, Any]:
    return {"samples_per_second": speed, "prompts_lost": lost, "samples_trained_twice": 0}


def test_seeding_is_compared_with_both_and_a_loss_is_a_goal_missed() -> None:
    found = seeding.compared({"remote": run_of(10.0), "colocated": run_of(20.0), "seeding": run_of(25.0)})
    assert found == {"over_remote": 2.5, "over_colocated": 1.25, "missed": []}
    found = seeding.compared({"remote": run_of(10.0), "colocated": run_of(20.0, lost=1), "seeding": run_of(15.0)})
    assert found["missed"] == ["over_colocated: 0.75, the goal is 1.0", "colocated: prompts_lost is 1"]


def test_the_estimate_is_compared_with_the_learned_length_without_a_goal() -> None:
    runs = {"remote": run_of(10.0), "colocated": run_of(10.0), "seeding": run_of(20.0), "estimated": run_of(19.0)}
    found = seeding.compared(runs)
    assert (found["estimated_over_seeding"], found["missed"]) == (0.95, [])


def test_each_place_is_a_job_that_is_valid_and_other_machines_are_there_for_good(tmp_path: Path) -> None:
    seeding.write_trace(3, trace := tmp_path / "trace.csv")
    assert [(event.at_s, event.what) for event in read_trace(trace).events] == [(0.0, "up")] * 3
    jobs = {
        where: load_job(
            ROOT / "benchmarks" / "jobs" / "seeding.yaml",
            ["rollout.length_ranking=history", *seeding.settings_for(where, trace)],
        )
        for where in (*seeding.WHERE, seeding.ESTIMATED)
    }
    assert {where for where, job in jobs.items() if job.scheduling.seeding} == {"colocated", "seeding", "estimated"}
    assert [where for where, job in jobs.items() if job.scheduling.seeding_end == "estimated"] == ["estimated"]
    assert jobs["remote"].rollout.workers == 0
    assert jobs["colocated"].provider.kind == "none"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_bench_seeding_runs_the_job_in_all_three_places(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    short = ["model.hidden=32", "model.layers=1", "algorithm.prompts_per_step=4", "rollout.workers=1"]
    short += ["trainer.backend=simulated"]
    model = asyncio.run(prepare_model(load_job(ROOT / "benchmarks" / "jobs" / "seeding.yaml", short), tmp_path))
    sets = [word for setting in short for word in ("--set", setting)]
    few = ["--machines", "1", "--steps", "4", "--skip", "1", "--cores", "64", "--model", str(model)]
    assert seeding.main(["--json", *few, *sets]) == 0
    told = json.loads(capfd.readouterr().out)
    assert set(told["runs"]) == set(seeding.WHERE)
    assert "seed_s" not in told["runs"]["remote"]
    for run in told["runs"].values():
        assert (run["prompts_lost"], run["samples_trained_twice"]) == (0, 0)
    speed = {where: run["samples_per_second"] for where, run in told["runs"].items()}
    assert told["over_remote"] == pytest.approx(speed["seeding"] / speed["remote"], abs=2e-3)
