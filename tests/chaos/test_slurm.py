"""A real run whose machines are jobs of a real Slurm: taken away, given back, and none left when it is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_job import simulated_job, simulated_rollout

from supervisors.testing.run_under_test import HeadraceRun
from tests.free_ports import free_ports
from tests.slurm_cluster import GRACE_S, SlurmCluster, slurm_cluster
from transport.zmq.security import generate_keys, write_keys

StartRun = Callable[..., HeadraceRun]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("cluster") / "slurm", 4) as cluster:
        yield cluster


@pytest.fixture
def start(headrace_run: StartRun, small_model: Path, tmp_path: Path, slurm: SlurmCluster) -> Callable[..., HeadraceRun]:
    """Starts a run of ``nodes`` machines; they reach its head at all interfaces, with its own keys."""

    def start(*, nodes: int, steps: int = 100_000, **settings: Any) -> HeadraceRun:
        write_keys(generate_keys(), tmp_path / "keys")
        job = simulated_job(
            small_model,
            steps=steps,
            rollout=simulated_rollout(small_model, workers=1),
            cluster={"place_rollout": "elastic", "listen": f"tcp://0.0.0.0:{free_ports()}"},
            provider={"kind": "slurm", "nodes_max": nodes, "notice_s": GRACE_S - 2.0, "slurm": settings},
            limits={"cluster_look_s": 0.5, "machine_retry_s": 1.0, "hand_over_s": 0.5},
        )
        return headrace_run(job, arguments=["--keys", str(tmp_path / "keys")])

    return start


def keys_of(run: HeadraceRun) -> list[str]:
    return ["--keys", str(run.run_dir.with_name("keys"))]


def running(slurm: SlurmCluster) -> set[str]:
    return {name for name, state in slurm.jobs().items() if state == "RUNNING" and name.startswith("small-")}


def working(run: HeadraceRun) -> set[str]:
    """Machines of the cluster with a worker."""
    return {node for node in run.workers().values() if node.startswith("small-")}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_machines_are_preempted_lost_and_unheard_of_and_nothing_is_lost_or_trained_twice_or_left(
    start: Callable[..., HeadraceRun], slurm: SlurmCluster
) -> None:
    """It grows to four nodes. Two are preempted with a notice and come back, one goes down, the controller is killed
    and comes back, at last the run itself is killed. Its next life ends the jobs that were left, and finishes the run.
    """
    run = start(nodes=4, partition="spot")
    run.wait_until("four machines", lambda: len(working(run)) == 4)
    first = working(run)

    slurm.occupy("others", 2)
    run.wait_until("preemption", lambda: slurm.jobs().get("others") == "RUNNING")
    gone = first - running(slurm)
    assert len(gone) == 2
    told_s, left_s = (
        {row["node"]: row["time_s"] for row in run.events(f"node_{what}")} for what in ("draining", "left")
    )
    assert all(left_s[node] - told_s[node] < GRACE_S for node in gone), "they have left in good order, and in time"
    slurm.until("two that wait", lambda: list(slurm.jobs().values()).count("PENDING") == 2)
    run.wait_until("its reason", lambda: "waits: " in run.last_words())
    slurm.command("scancel", "--name", "others")
    run.wait_until("four again", lambda: len(working(run)) == 4)
    assert not working(run) & gone, "a name is used once"

    lost = min(working(run))
    slurm.take_down(slurm.node_of(lost))
    run.wait_until("its replacement", lambda: lost not in slurm.jobs() and len(working(run) - {lost}) == 4)

    before = running(slurm)
    slurm.kill_controller()
    run.wait_for_step(len(run.rows()) + 10)
    slurm.start_controller()
    run.wait_for_step(len(run.rows()) + 10)
    assert working(run) == before == running(slurm), "nobody was started or ended meanwhile"

    run.kill()
    assert running(slurm) == before, "they outlive it for a while"
    begun = slurm.all_jobs().keys()
    run.resume(settings=[f"steps={len(run.rows()) + 15}"], arguments=keys_of(run))
    run.wait_until("others", lambda: len(slurm.all_jobs().keys() - begun) == 4)
    assert not running(slurm) & before
    summary = run.finish()
    assert (summary["prompts_lost"], summary["samples_trained_twice"]) == (0, 0)
    assert slurm.jobs() == {}
