"""A trainer with a replica on another machine, here a second node process, in real runs that are harmed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_ranks import job_of

from supervisors.testing.run_under_test import HeadraceRun
from tests.free_ports import free_ports


def job_across(model: Path, join: str, **sections: Any) -> dict[str, Any]:
    """Two ranks, each with a copy of the weights; workers stay on the head's machine."""
    cluster = {"nodes": 1, "place_rollout": "local", "place_replicas": "remote", "listen": join}
    return job_of(model, replicas=2) | {"cluster": cluster} | sections


def places(run: HeadraceRun) -> dict[str, str]:
    """Each process that runs, with its node."""
    return {row["name"]: row["node"] for row in run.call("tree") if row["state"] == "running" and row["pid"]}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_replica_on_another_node_trains_along(headrace_run: Callable[..., HeadraceRun], small_model: Path) -> None:
    join = f"tcp://127.0.0.1:{free_ports()}"
    run = headrace_run(job_across(small_model, join))
    run.add_node("one", join)
    run.wait_for_step(1)
    there = places(run)
    assert (there["trainer"], there["trainer.rank1"]) == ("head", "one")
    summary = run.finish()
    assert summary["prompts_lost"] == summary["samples_trained_twice"] == 0
