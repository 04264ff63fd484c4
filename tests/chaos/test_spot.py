"""A real run on machines that come and go by a spot trace, with and without notice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from small_job import simulated_rollout

from supervisors.testing.run_under_test import HeadraceRun

TRACE = Path(__file__).parents[2] / "configs" / "traces" / "three_nodes.csv"


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_spot_trace_is_replayed_on_a_real_run_and_nothing_is_lost_or_trained_twice(
    start_run: Callable[..., HeadraceRun], small_model: Path
) -> None:
    """Five machines, three at once at most; two go with notice and one without.

    The run is ended once the trace is over.
    """
    run = start_run(
        "spot",
        steps=100_000,
        rollout=simulated_rollout(small_model, workers=1),
        cluster={"place_rollout": "elastic", "prices": {"reserved": 10.0, "spot": 2.0}},
        provider={"kind": "local", "trace": str(TRACE)},
        limits={"hand_over_s": 0.5},
    )
    worked = {"node_joined": set[str](), "node_left": set[str]()}

    def seen(event: str) -> set[str]:
        worked[event] |= {row["node"] for row in run.events(event)}
        return worked[event]

    run.wait_until("the last machine", lambda: "e" in seen("node_joined"), timeout_s=240)
    run.wait_until("the end of the trace", lambda: {"a", "b", "c"} <= seen("node_left"), timeout_s=120)
    run.interrupt()
    summary = run.finish(state="interrupted")
    assert (summary["prompts_lost"], summary["samples_trained_twice"]) == (0, 0)

    started = {row["child"] for row in run.events("child_started")}
    assert started & {"rollout-a", "rollout-b", "rollout-c", "rollout-d", "rollout-e"}, (
        "machines of the trace have worked"
    )
    begun = {row["worker"]: row["time_s"] for row in reversed(run.events("worker_registered"))}
    told = {row["worker"]: row for row in run.events("worker_draining")}
    for row in run.events("node_draining"):
        if begun.get(worker := f"rollout-{row['node']}", row["time_s"]) < row["time_s"]:
            assert 0.5 < told[worker]["left_s"] <= 2.0, "its notice has reached the scheduler, with what is left of it"
    assert summary["cost"] > 0
    assert summary["cost_per_step"] == pytest.approx(summary["cost"] / summary["steps"])
    rows = run.rows()
    assert sum(row["cost"] for row in rows) == pytest.approx(summary["cost"])
    assert all(row["cost"] > 0 for row in rows)
