"""What an operator sees of a real run: waits of every process, a silent one among them, lost messages, late loops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from small_job import simulated_job, simulated_rollout

from supervisors.testing.run_under_test import HeadraceRun

StartRun = Callable[..., HeadraceRun]
ROLES = ("trainer", "weights", "rewards", "rollout-0", "ranker")


@pytest.mark.timeout(400)
def test_every_process_is_seen_and_one_that_was_stopped_is_seen_to_be_silent(
    headrace_run: StartRun, small_model: Path
) -> None:
    limits = {"health_interval_s": 0.5, "stopped_grace_s": 3.0}
    rollout = simulated_rollout(small_model, step_s=0.01, length_ranking="learned")
    run = headrace_run(simulated_job(small_model, steps=10_000, limits=limits, rollout=rollout))
    run.wait_for_step(1)
    rows = run.call("stalls", {"longer_than_s": 0.0})
    assert not [row for row in rows if row["kind"] == "silent"]
    assert [row["since_s"] for row in rows] == sorted((row["since_s"] for row in rows), reverse=True)

    run.inject("hang", "trainer")
    silent = run.wait_until(
        "silent trainer",
        lambda: [row for row in run.call("stalls") if row["kind"] == "silent" and row["waits_for"].endswith("trainer")],
    )
    assert silent[0]["waiter"] == "head"
    run.wait_for_event("child_started", child="trainer")

    letters = run.call("dead_letters")
    counted = {(row["process"], row["reason"]) for row in letters["counts"]}
    assert {(row["process"], row["reason"]) for row in letters["newest"]} <= counted

    for role in ROLES:
        health = run.wait_until(
            f"health of {role}",
            lambda role=role: next((h for h in run.events("process_health") if h["process"].endswith(role)), None),
        )
        assert 0 <= health["loop_lag_p50_s"] <= health["loop_lag_p99_s"] <= health["loop_lag_max_s"]
    assert "head" in {health["process"] for health in run.events("process_health")}
    run.interrupt()
    run.finish(state="interrupted")
