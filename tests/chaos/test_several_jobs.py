"""Real runs of several jobs under one command: what a lone job may have, each of them may have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_job import simulated_job, simulated_rollout

from supervisors.testing.run_under_test import HeadraceJobs

TRACE = """\
at_s,node,event,kind
0,a,up,spot
0,b,up,spot
6,a,kill,spot
"""
FAULTS: list[dict[str, Any]] = [
    {"kind": "kill", "target": {"role": "rollout", "job": "first"}, "after_step": 2},
    {"kind": "kill", "target": {"name": "trainer", "job": "second"}, "after_step": 2},
    {"kind": "kill", "target": {"role": "head"}, "at_s": 4},
]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_jobs_one_with_machines_of_its_own_lose_nothing_under_a_plan_that_harms_both_and_their_head(
    headrace_jobs: Callable[..., HeadraceJobs], small_model: Path, tmp_path: Path
) -> None:
    """The machines are the first job's alone, and end with it while the second still runs."""
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    elastic = {"place_rollout": "elastic"}
    jobs = [
        simulated_job(small_model, name="first", steps=20, cluster=elastic, checkpoint={"every": 5},
                      rollout=simulated_rollout(small_model, step_s=0.03, workers=1),
                      provider={"kind": "local", "trace": str(trace)}),
        simulated_job(small_model, name="second", steps=50, cluster=elastic, checkpoint={"every": 5},
                      rollout=simulated_rollout(small_model, step_s=0.03, workers=1)),
    ]  # fmt: skip
    run = headrace_jobs(jobs, faults=FAULTS)
    first, second = run.jobs["first"], run.jobs["second"]

    def is_over_with_its_machines() -> bool:
        own = [node for node in run.call("nodes") if node["node"].startswith("first-")]
        return (first.run_dir / "summary.json").exists() and not own

    run.wait_until("the first job and its machines are gone", is_over_with_its_machines, timeout_s=120.0)
    assert not (second.run_dir / "summary.json").exists()
    summaries = run.finish()
    for summary in summaries.values():
        assert (summary["prompts_lost"], summary["samples_trained_twice"]) == (0, 0)
    assert summaries["first"]["faults"] == {"injected": 2, "failed": 0, "skipped": 0}
    assert summaries["second"]["faults"] == {"injected": 1, "failed": 0, "skipped": 0}

    assert [row["fault"] for row in second.events("fault_injected")] == [1]
    assert first.events("head_restarted") and second.events("head_restarted")
    own = {"rollout-first-a", "rollout-first-b"}
    assert {row["worker"] for row in first.events("worker_registered")} & own, "its machines have worked for it"
    assert not {row["worker"] for row in second.events("worker_registered")} & own, "and for nobody else"
    assert not [row for row in second.events() if str(row.get("node", "")).startswith("first-")], (
        "nor told to anybody else"
    )
