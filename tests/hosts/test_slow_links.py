"""Links that are cut for long, or slow: nothing is lost; what weights cost on a slow one is printed (pytest -s).

host head ══ 20 ms each way, 100 Mbit/s ══ switch ── host one, host two        two sites, with the slow link between
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from tests.chaos.small_job import SMALL_JOB, TORCH_TRAINER, simulated_job, simulated_rollout
from tests.hosts.cluster import ClusterOfHosts
from tests.hosts.network import Cable, Network

StartCluster = Callable[..., ClusterOfHosts]
FAR: Final = ("--site", "far")
SLOW: Final = Cable(delay_s=0.02, rate="100mbit")
STEPS: Final = 6
MODEL: Final = {"source": "tiny", "hidden": 256, "layers": 4, "dtype": "bfloat16", "warm_start_steps": 0}
"""Some megabytes; at a rate of 1e-6 few of its bfloat16 weights change with a step."""


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


def over_a_slow_link(start_cluster: StartCluster, network: Network, **weights: Any) -> float:
    """How many times a version's size a step sends over the slow link, by what has left the head's host in all."""
    rollout = {**SMALL_JOB["rollout"], "workers": 4}
    parts = {**TORCH_TRAINER, "model": MODEL, "rollout": rollout, "weights": weights}
    job = {**SMALL_JOB, **parts, "checkpoint": {"every": 0}, "trainer": {"lr": 1e-6, "threads": 1}, "steps": STEPS}
    cluster = start_cluster(job, nodes={"one": FAR, "two": FAR}, cables={"head": SLOW})
    run, head = cluster.run, cluster.hosts["head"]
    run.wait_for_step(0)
    before, first = network.bytes_from(head), len(run.rows())
    summary = run.finish(timeout_s=400)
    assert (summary["prompts_lost"], summary["samples_trained_twice"]) == (0, 0)
    rows = run.rows()[first:]
    steps = max(1, len(rows))
    sent = (network.bytes_from(head) - before) / steps
    wire, whole = (sum(row[column] for row in rows) / steps for column in ("pull_wire_bytes", "pull_bytes"))
    slowest_s = max(row["pull_seconds_max"] for row in rows)
    print(
        f"\n{weights}: a step has {whole / 1e6:.2f} MB of weights for 4 workers, {wire / 1e6:.2f} MB over the network "
        f"to 2 nodes, {sent / 1e6:.2f} MB from the head's site in all; slowest pull {slowest_s:.2f} s"
    )
    return sent / (whole / 4)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("delta", "relay"), [(False, False), (False, True), (True, True)], ids=["whole", "whole, relayed", "delta, relayed"]
)
def test_weights_cross_a_slow_link_and_nothing_is_lost(
    start_cluster: StartCluster, network: Network, delta: bool, relay: bool
) -> None:
    """Whole, each of the four workers fetches it; relayed, one does; as a delta, that is a few hundredths of it."""
    sent = over_a_slow_link(start_cluster, network, delta=delta, relay=relay)
    assert sent < (0.2 if delta else 1.6 if relay else 6.0)
