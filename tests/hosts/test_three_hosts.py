"""A head with the trainer on one host, nodes with two rollout workers each on two others, and a link that is cut."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks._processes import ROOT
from benchmarks.namespaces.cluster import CONTROL_PORT, ClusterOfHosts
from benchmarks.namespaces.network import Cable, Network
from tests.chaos.small_job import simulated_job, simulated_rollout

StartCluster = Callable[..., ClusterOfHosts]
pytestmark = pytest.mark.cluster

FAR = ("--site", "far")


def at_work(cluster: ClusterOfHosts) -> bool:
    """Whether each node has its two workers."""
    return Counter(cluster.workers().values()) == {"one": 2, "two": 2}


def nothing_lost(cluster: ClusterOfHosts) -> None:
    """End the run, and see that no sample is lost or was trained twice."""
    assert cluster.ctl("head", "cancel")["state"] == "stopping"
    summary = cluster.run.finish(state="interrupted")
    assert (summary["prompts_lost"], summary["samples_trained_twice"]) == (0, 0)


@pytest.mark.timeout(300)
def test_a_run_over_three_hosts_goes_on_when_a_link_is_cut_and_its_node_comes_back(
    start_cluster: StartCluster, network: Network, small_model: Path
) -> None:
    """Nobody's name means anything elsewhere, and at home it leads to loopback. Nodes know the head's key alone."""
    rollout = simulated_rollout(small_model, step_s=0.02, workers=4)
    cluster = start_cluster(simulated_job(small_model, steps=5000, rollout=rollout), nodes={"one": FAR, "two": FAR})
    run, one = cluster.run, cluster.hosts["one"]
    run.wait_until("four workers", lambda: at_work(cluster))
    run.wait_for_step(2)
    assert f"tcp://10.77.0.1:{CONTROL_PORT}?key=" in run.last_words()
    assert cluster.ctl("two", "jobs")[0]["state"] == "running"
    pulled = run.rows()[-1]
    assert pulled["pull_wire_bytes"] > 0, "nodes have a memory of their own, and map nothing of the trainer's"
    assert cluster.linked("one", "two"), "the second node of the site gets versions from the first"

    timers = re.findall(r"keepalive,([^,]+),", one.run("ss", "-tnoH", "state", "established"))
    assert timers, "connections on which nothing is sent are looked after"
    assert all("hour" not in left and "min" not in left for left in timers), "by the minute, not once in two hours"

    network.cut(one)
    run.wait_for_event("worker_down", reason="unreachable")
    step = len(run.rows())
    run.wait_for_step(step + 5)
    assert set(cluster.workers().values()) == {"two"}
    network.heal(one)
    run.wait_until("four workers again", lambda: at_work(cluster))
    run.wait_for_step(len(run.rows()) + 3)
    nothing_lost(cluster)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_nodes_that_cannot_reach_each_other_get_each_version_from_the_head_and_only_the_first_late(
    start_cluster: StartCluster, network: Network, small_model: Path
) -> None:
    """A pull by a way that does not exist takes ten seconds until it is given up; it is tried once, not each time."""
    rollout = simulated_rollout(small_model, step_s=0.02, workers=4)
    cluster = start_cluster(simulated_job(small_model, steps=5000, rollout=rollout), nodes={"one": FAR, "two": FAR})
    run = cluster.run
    run.wait_until("four workers", lambda: at_work(cluster))
    run.wait_for_step(2)
    network.isolate(*(cluster.hosts[name] for name in ("one", "two")))
    step = len(run.rows())
    run.wait_until(
        "ten steps whose version all four had in time",
        lambda: len(run.rows()) > step + 10 and all(row["weights_loaded"] == 4 for row in run.rows()[-10:]),
    )
    nothing_lost(cluster)


_WHO_AM_I = """
import json, sys
from actors.weights.segments import host_id
from transport.own_address import address_towards, own_address
print(json.dumps([own_address(), [address_towards(host) for host in sys.argv[1:]], host_id()]))
"""


def test_an_address_that_is_told_is_that_of_the_interface_by_which_the_others_are_reached(
    network: Network, tmp_path: Path
) -> None:
    """Also of a machine with two interfaces, without a default route, and with a name that leads to loopback."""
    head, node = network.host("head"), network.host("node")
    with Network(tmp_path, prefix="10.88.0") as second:
        elsewhere = second.host("elsewhere")
        assert second.connect(node, Cable(), "eth1") == "10.88.0.2"
        words = ("env", f"PYTHONPATH={ROOT}", sys.executable, "-P", "-c", _WHO_AM_I)
        own, towards, memory = json.loads(node.run(*words, head.address, elsewhere.address, "0.0.0.0"))
        assert own == "10.77.0.2", "of the first interface"
        assert towards == ["10.77.0.2", "10.88.0.2", "10.77.0.2"]
        node.run("ip", "route", "add", "default", "via", elsewhere.address)
        assert json.loads(node.run(*words))[0] == "10.88.0.2", "of the default route"
        node.run("hostname", "head")
        renamed, there = json.loads(node.run(*words))[2], json.loads(head.run(*words))[2]
        assert renamed != memory
        assert renamed != there, "of one name, and with memory of their own"
