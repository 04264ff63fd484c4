"""A trainer on two hosts, with a replica or a part of one copy on each: a rank dies, its host is lost, another takes
it, and nothing is learned otherwise. Hosts have a shared memory each and reach each other by their own addresses
alone.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.namespaces.cluster import ClusterOfHosts
from benchmarks.namespaces.network import Network
from supervisors.testing.run_under_test import HeadraceRun
from tests.chaos.rank_runs import assert_alike, job_of

pytestmark = pytest.mark.cluster

StartCluster = Callable[..., ClusterOfHosts]
APART = {"cluster": {"place_rollout": "local", "place_replicas": "remote", "replicas_unencrypted": True}}


SPANNING = {"cluster": {"place_rollout": "local", "replicas_unencrypted": True}}
"""For a trainer with ``nodes``: one copy of the weights over two hosts."""


def here(model: Path, *, ranks: int = 2, steps: int = 8) -> dict[str, Any]:
    """Two copies of the weights, on one machine unless APART is put on top, and simulated engines."""
    return job_of(model, simulated=True, ranks=ranks, replicas=2) | {"steps": steps}


def places(run: HeadraceRun) -> list[str]:
    """Where the second replica has been, one life of the trainer after another."""
    return [row["nodes"] for row in run.events("replicas_placed")]


@pytest.mark.timeout(300)
def test_two_hosts_train_along_and_when_the_link_between_them_is_cut_another_host_takes_the_replica(
    start_cluster: StartCluster, network: Network, small_model: Path
) -> None:
    cluster = start_cluster(here(small_model, steps=14) | APART, nodes={"one": (), "two": ()})
    run = cluster.run
    run.wait_for_step(2)
    assert places(run) == ["one"]
    assert cluster.linked("head", "one")
    network.cut(cluster.hosts["one"])
    summary = run.finish()
    assert summary["prompts_lost"] == summary["samples_trained_twice"] == 0
    assert places(run) == ["one", "two"]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 4])
def test_after_a_kill_a_cut_and_the_end_of_a_machine_the_weights_are_those_of_an_undisturbed_run_on_one_machine(
    start_cluster: StartCluster,
    headrace_run: Callable[..., HeadraceRun],
    network: Network,
    small_model: Path,
    ranks: int,
) -> None:
    job = here(small_model, ranks=ranks, steps=40)
    alone = headrace_run(job, name="alone")
    alone.finish()
    cluster = start_cluster(job | APART, nodes={"one": (), "two": ()})
    run, last = cluster.run, f"trainer.rank{ranks - 1}"
    run.wait_for_step(3)
    os.kill(pid_of(cluster, last), signal.SIGKILL)
    run.wait_until("the second life", lambda: places(run) == ["one", "one"])
    run.wait_for_step(9)
    network.cut(cluster.hosts["one"])
    run.wait_until("the third life", lambda: places(run) == ["one", "one", "two"])
    network.heal(cluster.hosts["one"])
    run.wait_until("the first node again", lambda: "one" in {row["node"] for row in cluster.ctl("head", "nodes")})
    run.wait_for_step(15)
    run.nodes["two"].kill()
    assert_alike(run, alone, 0)
    assert places(run) == ["one", "one", "two", "one"]
    counted = run.events("child_restarting")
    assert len(counted) == 3, counted


@pytest.mark.timeout(400)
def test_one_copy_over_two_hosts_learns_and_publishes_what_one_host_does_though_the_second_host_is_lost(
    start_cluster: StartCluster,
    headrace_run: Callable[..., HeadraceRun],
    network: Network,
    small_model: Path,
) -> None:
    """The second host's rows reach workers from there, and checkpoints through the leader: hosts share no memory."""
    job = job_of(small_model, simulated=True) | {"steps": 14}
    alone = headrace_run(job, name="alone")
    alone.finish()
    spanning = job_of(small_model, simulated=True, nodes=2) | SPANNING | {"steps": 14}
    cluster = start_cluster(spanning, nodes={"one": (), "two": ()})
    run = cluster.run
    run.wait_for_step(3)
    assert places(run) == ["one"]
    assert cluster.linked("head", "one")
    network.cut(cluster.hosts["one"])
    assert_alike(run, alone, 0)
    assert places(run) == ["one", "two"]
    assert len(run.events("child_restarting")) == 1
    served = {node: sum(row["bytes"] for row in served_by(run, node)) for node in ("head", "one", "two")}
    assert min(served.values()) > 0, served
    both = {row["version"]: row["bytes"] for row in served_by(run, "two")}
    both.pop(min(both))  # the version of the loss: of it workers may have had some rows already
    assert both and both == {row["version"]: row["bytes"] for row in served_by(run, "head") if row["version"] in both}


def served_by(run: HeadraceRun, node: str) -> list[dict[str, Any]]:
    return [row for row in run.events("weights_served") if row["node"] == node]


def pid_of(cluster: ClusterOfHosts, name: str) -> int:
    rows = cluster.ctl("head", "tree")
    return next(int(row["pid"]) for row in rows if row["name"] == name and row["state"] == "running")
