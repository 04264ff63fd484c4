"""A head and nodes as processes of their own, over TCP; nodes come and go while a job runs."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_job import simulated_job, simulated_rollout

from supervisors.testing.run_under_test import HeadraceCluster
from tests.free_ports import free_ports

StartCluster = Callable[..., HeadraceCluster]


@pytest.fixture
def cluster(headrace_cluster: StartCluster) -> HeadraceCluster:
    return headrace_cluster(f"tcp://127.0.0.1:{free_ports()}")


def job_on_nodes(model: Path) -> dict[str, Any]:
    """Longer than any test; its two workers need a node each."""
    return simulated_job(model, steps=2000, cluster={"nodes": 2, "place_rollout": "remote"})


def wait_at_work(cluster: HeadraceCluster, *nodes: str) -> None:
    cluster.wait_until(f"workers on {nodes}", lambda: set(cluster.workers().values()) == set(nodes))


@pytest.mark.timeout(500)
def test_the_head_is_killed_nodes_leave_and_join_and_the_job_goes_on_with_nothing_lost(
    cluster: HeadraceCluster, small_model: Path
) -> None:
    """Two nodes over TCP carry the rollout workers. The next head goes on with the processes that there are.

    Then a node is told to go, another comes, and its worker moves there. At last the head is gone for good, and a node
    that is told to leave does so at once.
    """
    cluster.join("first", "second")
    cluster.submit(job_on_nodes(small_model))
    cluster.wait_for_step(2)
    wait_at_work(cluster, "first", "second")
    before, workers = cluster.processes(), cluster.workers()

    os.kill(before.pop("head"), signal.SIGKILL)
    cluster.wait_until("another head", lambda: before.items() <= cluster.processes().items())
    cluster.wait_until("its job", lambda: cluster.call("jobs")[0]["state"] == "running")
    cluster.wait_for_step(len(cluster.rows()) + 5)
    assert before.items() <= cluster.processes().items(), "nobody was started again"
    assert cluster.workers() == workers

    cluster.nodes["first"].terminate()
    cluster.join("third")
    wait_at_work(cluster, "second", "third")
    assert cluster.nodes["first"].wait(timeout=120) == 0
    cluster.wait_for_step(len(cluster.rows()) + 5)

    assert cluster.call("cancel")["state"] == "stopping"
    cluster.wait_until("end of the job", lambda: cluster.call("jobs")[0]["state"] == "interrupted")
    last = cluster.rows()[-1]
    assert cluster.call("jobs")[0]["step"] == len(cluster.rows())
    assert (last["prompts_lost"], last["samples_trained_twice"]) == (0, 0)
    register = cluster.directory / "head.jobs.json"  # the job leaves it once its processes are down
    cluster.wait_until("end of its processes", lambda: json.loads(register.read_text())["run_dirs"] == [])

    cluster.kill()
    time.sleep(2.5)  # the nodes have noticed, and look for the next one
    told_s = time.monotonic()
    cluster.nodes["second"].terminate()
    assert cluster.nodes["second"].wait(timeout=120) == 0
    assert time.monotonic() - told_s < 10.0


def lent_job(model: Path, name: str, steps: int, *, step_s: float) -> dict[str, Any]:
    """Steps of some seconds on one worker of its own, and on what there is of machines that come and go."""
    rollout = simulated_rollout(model, step_s=step_s, workers=1)
    cluster = {"place_rollout": "elastic"}
    return simulated_job(model, name=name, steps=steps, cluster=cluster, rollout=rollout, checkpoint={"every": 0})


def lent_workers(cluster: HeadraceCluster, job: str) -> dict[str, int]:
    """Process ids of the workers that a job has on nodes."""
    rows = [row for row in cluster.call("tree", {"job": job}) if row["role"] == "rollout"]
    return {row["name"]: row["pid"] for row in rows if row["state"] == "running" and row["node"] != "head"}


@pytest.mark.long
@pytest.mark.timeout(500)
def test_a_worker_of_one_job_serves_another_without_being_started_again_and_comes_back_and_nothing_is_lost(
    cluster: HeadraceCluster, small_model: Path
) -> None:
    cluster.join("first", "second")
    cluster.submit(lent_job(small_model, "long", 1000, step_s=0.05))
    cluster.wait_until("both workers", lambda: len(lent_workers(cluster, "long")) == 2)
    pids = set(lent_workers(cluster, "long").values())
    long_run = cluster.run_dir
    cluster.wait_for_step(1)

    cluster.run_dir = Path(cluster.call("submit", {"job": lent_job(small_model, "short", 20, step_s=0.05)})["run_dir"])
    cluster.wait_until("a worker for the second job", lambda: lent_workers(cluster, "short"))
    shared = [*lent_workers(cluster, "long").values(), *lent_workers(cluster, "short").values()]
    assert sorted(shared) == sorted(pids), "the processes are those of before"

    cluster.wait_until("end of the second job", lambda: jobs(cluster)["short"]["state"] == "finished", timeout_s=200)
    assert cluster.report(must_finish=True).clean
    cluster.wait_until("both workers again", lambda: len(lent_workers(cluster, "long")) == 2)
    cluster.run_dir = long_run
    cluster.call("cancel", {"job": "long"})
    cluster.wait_until("end of the first job", lambda: jobs(cluster)["long"]["state"] == "interrupted")
    assert cluster.report().clean
    row = cluster.rows()[-1]
    assert (row["prompts_lost"], row["samples_trained_twice"]) == (0, 0)


def jobs(cluster: HeadraceCluster) -> dict[str, dict[str, Any]]:
    return {job["job"]: job for job in cluster.call("jobs")}
