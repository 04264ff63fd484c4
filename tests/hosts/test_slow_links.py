"""Links that are cut for long, or slow: nothing is lost, and a slow one carries no more than it must."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from benchmarks.jobs import hosts
from benchmarks.namespaces.cluster import ClusterOfHosts
from benchmarks.namespaces.network import Network
from configs.limits import DEFAULT_LIMITS
from tests.chaos.small_job import simulated_job, simulated_rollout

pytestmark = pytest.mark.cluster

StartCluster = Callable[..., ClusterOfHosts]
FAR: Final = ("--site", "far")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cut", ["one", "head"])
def test_a_link_that_is_cut_for_ten_seconds_loses_nothing(
    start_cluster: StartCluster, network: Network, small_model: Path, cut: str
) -> None:
    """The head's link cuts off both nodes: nobody generates until it is back."""
    rollout = simulated_rollout(small_model, step_s=0.02, workers=4)
    cluster = start_cluster(simulated_job(small_model, steps=5000, rollout=rollout), nodes={"one": FAR, "two": FAR})
    run = cluster.run
    run.wait_until("four workers", lambda: len(cluster.workers()) == 4)
    run.wait_for_step(3)
    network.cut(cluster.hosts[cut])
    time.sleep(10.0)
    network.heal(cluster.hosts[cut])
    healed_s = time.monotonic()
    run.wait_for_step(len(run.rows()))
    print(f"\nlink of {cut} cut for 10 s; a step {time.monotonic() - healed_s:.1f} s after it is back", end="")
    run.wait_until("four workers again", lambda: len(cluster.workers()) == 4)
    print(f", all workers after {time.monotonic() - healed_s:.1f} s")
    run.wait_for_step(len(run.rows()) + 5)
    assert cluster.ctl("head", "cancel")["state"] == "stopping"
    summary = run.finish(state="interrupted")
    assert (summary["prompts_lost"], summary["samples_trained_twice"]) == (0, 0)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_link_that_is_cut_in_one_direction_only_loses_nothing_and_the_others_go_on(
    start_cluster: StartCluster, network: Network, small_model: Path
) -> None:
    """The trainer publishes a version every 0.2 s: pulls are under way whenever it breaks."""
    rollout = simulated_rollout(small_model, step_s=0.02, workers=4)
    cluster = start_cluster(simulated_job(small_model, steps=5000, rollout=rollout), nodes={"one": FAR, "two": FAR})
    run, one = cluster.run, cluster.hosts["one"]
    noticed_s = DEFAULT_LIMITS.heartbeat_timeout_s + DEFAULT_LIMITS.lease_s
    for towards in (False, True):
        run.wait_until("four workers", lambda: len(cluster.workers()) == 4)
        run.wait_for_step(len(run.rows()) + 3)
        network.silence(one, towards=towards)
        cut_s = time.monotonic()
        run.wait_until("its workers are out", lambda: set(cluster.workers().values()) == {"two"}, timeout_s=noticed_s)
        out_s = time.monotonic() - cut_s
        run.wait_for_step(len(run.rows()), timeout_s=DEFAULT_LIMITS.pull_patience_s + noticed_s)
        step_s = time.monotonic() - cut_s
        time.sleep(max(0.0, 10.0 - step_s))
        network.unsilence(one, towards=towards)
        healed_s = time.monotonic()
        run.wait_until("four workers again", lambda: len(cluster.workers()) == 4)
        way = "towards" if towards else "from"
        print(f"\nnothing {way} one: its workers out after {out_s:.1f} s, a step after {step_s:.1f} s,", end="")
        print(f" all workers {time.monotonic() - healed_s:.1f} s after it is back", end="")
    run.wait_for_step(len(run.rows()) + 5)
    assert cluster.ctl("head", "cancel")["state"] == "stopping"
    summary = run.finish(state="interrupted")
    assert (summary["prompts_lost"], summary["samples_trained_twice"]) == (0, 0)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_weights_cross_a_slow_link_and_nothing_is_lost(capfd: pytest.CaptureFixture[str]) -> None:
    """Plain, each of the four workers fetches a version; relayed, one does; deltas are a few hundredths of it."""
    assert hosts.main(["--json", "--steps", "7"]) == 0
    told = json.loads(capfd.readouterr().out)
    ways, whole_mb = told["ways"], told["ways"]["plain"]["weights_mb"]["one"] / 2
    for name, way in ways.items():
        assert (way["prompts_lost"], way["samples_trained_twice"]) == (0, 0), name
        assert 0 < way["limit_s"] < way["until_last_s"], name
    crossed = {name: way["link_mb"]["head"]["sent"] / whole_mb for name, way in ways.items()}
    assert 3.0 < crossed["plain"] < 6.0 and 0.7 < crossed["relay"] < 1.6, "the first version has half crossed before"
    assert crossed["both"] < 0.1 and crossed["delta"] < 0.2
    assert ways["plain"]["ratio"] < 2.0 and ways["relay"]["ratio"] < 2.0, "far above: this machine may be busy"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_link_that_loses_a_packet_in_a_hundred_costs_time_and_no_sample(capfd: pytest.CaptureFixture[str]) -> None:
    assert hosts.main(["--json", "--steps", "7", "--loss", "0.01", "--ways", "both"]) == 0
    (way,) = json.loads(capfd.readouterr().out)["ways"].values()
    assert (way["prompts_lost"], way["samples_trained_twice"]) == (0, 0)
    assert way["versions"] > 0
