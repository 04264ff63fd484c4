"""Links that are cut for long, or slow: nothing is lost, and a slow one carries no more than it must."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from benchmarks import hosts
from benchmarks.namespaces.cluster import ClusterOfHosts
from benchmarks.namespaces.network import Network
from tests.chaos.small_job import simulated_job, simulated_rollout

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
    assert 4.0 < crossed["plain"] < 6.0 and 1.0 < crossed["relay"] < 1.6
    assert crossed["both"] < 0.1 and crossed["delta"] < 0.2
    assert ways["plain"]["ratio"] < 2.0 and ways["relay"]["ratio"] < 2.0, "far above: this machine may be busy"
