"""Real functions are killed as they start, as they sleep, and as the head is away: the run finishes, all whole."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from small_job import simulated_rollout

from supervisors.testing.run_under_test import HeadraceRun

FUNCTIONS: dict[str, Any] = {
    "cluster": {"place_rollout": "elastic", "prices": {"reserved": 10.0, "function": 4.0}},
    "scheduling": {"policy": "planned", "workers_max": 2},
    "provider": {"kind": "functions", "idle_s": 2.0, "bill_rounding_s": 0.0},
    "limits": {"function_start_s": 8.0},
}

Start = Callable[..., HeadraceRun]


def with_functions(start_run: Start, model: Path, name: str, **sections: Any) -> HeadraceRun:
    """A run of which all workers are functions, two at most."""
    rollout = simulated_rollout(model, workers=0, length_ranking="history")
    return start_run(name, **{**FUNCTIONS, "rollout": rollout, **sections})


def machine_of(run: HeadraceRun, node: str) -> int | None:
    """Process id of a function's machine: a child of the process of the command, however young it is."""
    for child in psutil.Process(run.process.pid).children():
        words = child.cmdline()
        if "--name" in words and words[words.index("--name") + 1] == node:
            return child.pid
    return None


def kill_machine(run: HeadraceRun, node: str) -> None:
    os.kill(run.wait_until(f"machine {node}", lambda: machine_of(run, node)), signal.SIGKILL)


def kept_whole(run: HeadraceRun) -> dict[str, Any]:
    """The run's summary, once it has finished, and nothing was lost or trained twice; its bill adds up."""
    summary = run.finish()
    assert (summary["prompts_lost"], summary["samples_trained_twice"]) == (0, 0)
    rows = run.rows()
    assert sum(row["billed_worker_s"] for row in rows) == pytest.approx(summary["billed_worker_s"], abs=0.1)
    assert all(row["billed_worker_s"] >= row["compute_worker_s"] > 0 for row in rows)
    assert all(row["cost"] > row["billed_worker_s"] * 4.0 / 3600.0 for row in rows), "the head's machine costs, too"
    assert summary["functions_started"] == len(run.events("function_ordered"))
    return summary


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_function_that_is_killed_as_it_starts_is_gone_on_without_and_replaced(
    start_run: Start, small_model: Path
) -> None:
    run = with_functions(start_run, small_model, "starting", steps=25)
    kill_machine(run, "f0")
    kept_whole(run)
    [missing] = run.events("function_missing")
    assert (missing["node"], missing["why"]) == ("f0", "is not ready in time")
    assert {row["node"] for row in run.events("function_ready")} >= {"f1"}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_function_that_is_killed_asleep_costs_the_run_nothing(start_run: Start, small_model: Path) -> None:
    """The plan does with one worker, so the other one sleeps."""
    scheduling = FUNCTIONS["scheduling"] | {"plan": {"choose": "lambda", "time_weight": 0.0}}
    provider = FUNCTIONS["provider"] | {"idle_s": 3600.0}
    run = with_functions(start_run, small_model, "asleep", steps=150, scheduling=scheduling, provider=provider)
    run.wait_for_step(5)
    used = run.events("step_planned")[-1]["workers"]
    asleep = next(row["node"] for row in run.events("function_ready") if f"rollout-{row['node']}" not in used)
    kill_machine(run, asleep)
    run.wait_for_event("function_missing", node=asleep, why="is lost")
    kept_whole(run)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_heads_next_life_takes_over_the_functions_that_start_as_it_is_killed(
    start_run: Start, small_model: Path
) -> None:
    run = with_functions(start_run, small_model, "head", steps=60)
    run.wait_until("machines that start", lambda: machine_of(run, "f0") and machine_of(run, "f1"))
    before = {node: machine_of(run, node) for node in ("f0", "f1")}
    os.kill(run.processes()["head"], signal.SIGKILL)
    run.wait_for_step(1)
    assert {node: machine_of(run, node) for node in before} == before, "they are the same machines"
    summary = kept_whole(run)
    assert summary["restarts"] >= 1
    assert {row["node"] for row in run.events("function_ordered")} == set(before)
