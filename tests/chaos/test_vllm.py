"""Real vLLM workers are killed, and what carries them: nothing is lost, they come back with the right weights, and no
process is left over.

There is no engine-core process to kill apart from the worker's: the core runs inside it (docs/decisions/0009). So what
dies by SIGKILL is the worker with its core, and the process of the node agent, with which its worker has to end.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from small_job import SMALL_JOB

from configs.schema import JobConfig
from supervisors.preparation.tiny_model import make_tiny_model
from supervisors.testing.run_under_test import HeadraceCluster
from tests.free_ports import free_ports

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

if importlib.util.find_spec("vllm") is None and os.environ.get("HEADRACE_REQUIRE_VLLM") != "1":
    pytest.skip(
        "vLLM is not installed; `make vllm` adds it, HEADRACE_REQUIRE_VLLM=1 makes this a failure",
        allow_module_level=True,
    )

PATIENCE_S = 400.0

JOB: dict[str, Any] = SMALL_JOB | {
    "steps": 100_000,
    "model": {"source": "tiny", "layers": 2, "warm_start_steps": 0},
    "algorithm": {"group_size": 4, "prompts_per_step": 4},
    "rollout": {"engine": "vllm", "max_tokens": 64, "threads": 1, "max_running": 16},
    "checkpoint": {"every": 1000, "keep": 1000},
    "limits": {"ready_timeout_s": PATIENCE_S},
}


@pytest.fixture
def cluster(headrace_cluster: Callable[..., HeadraceCluster]) -> HeadraceCluster:
    return headrace_cluster(f"tcp://127.0.0.1:{free_ports()}")


def at_work(cluster: HeadraceCluster, *nodes: str) -> dict[str, str]:
    """Wait until exactly these nodes have a worker; returns which."""

    def look() -> dict[str, str] | None:
        workers = {node: worker for worker, node in cluster.workers().items()}
        return workers if set(workers) == set(nodes) else None

    return cluster.wait_until(f"workers on {nodes}", look, timeout_s=PATIENCE_S)


def go_on(cluster: HeadraceCluster, steps: int) -> None:
    wanted = len(cluster.rows()) + steps
    cluster.wait_until(f"{wanted} steps", lambda: len(cluster.rows()) >= wanted, timeout_s=PATIENCE_S)


def wait_pulled(cluster: HeadraceCluster, worker: str, lives: int) -> None:
    """Until the ``lives``-th life of ``worker`` has registered and then served a version."""

    def look() -> bool:
        rows = [row for row in cluster.events() if row.get("worker") == worker]
        begun = [i for i, row in enumerate(rows) if row["event"] == "worker_registered"]
        return len(begun) >= lives and any(row["event"] == "worker_version" for row in rows[begun[lives - 1] :])

    cluster.wait_until("its version", look, timeout_s=PATIENCE_S)


def gone(*pids: int) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def of_the_run(directory: Path) -> dict[int, str]:
    """Processes that have a file below ``directory`` open, or are named by it."""
    found: dict[int, str] = {}
    for process in psutil.process_iter(["pid", "cmdline"]):
        try:
            if any(file.path.startswith(str(directory)) for file in process.open_files()):
                found[process.pid] = " ".join(process.info["cmdline"])
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_vllm_workers_and_their_node_are_killed_and_every_sample_goes_on(
    cluster: HeadraceCluster, tmp_path: Path, workers: int
) -> None:
    """One worker is killed with its node. Of two, the other is killed by itself before."""
    make_tiny_model(JobConfig.model_validate(JOB), tmp_path / "model")
    rollout = JOB["rollout"] | {"workers": workers}
    places = {"nodes": workers, "place_rollout": "remote"}
    nodes, killed = ["first", "second"][-workers:], ""
    cluster.join(*nodes)
    model = {"source": "hf", "path": str(tmp_path / "model")}
    cluster.submit(JOB | {"model": model, "rollout": rollout, "cluster": places})
    before = at_work(cluster, *nodes)
    go_on(cluster, 2)
    for node, worker in before.items():
        pid = cluster.processes()[worker]
        assert psutil.Process(pid).ppid() == cluster.nodes[node].pid
        assert psutil.Process(pid).children() == [], "the engine core is no process of its own"

    if workers == 2:  # the worker and its core
        killed = before["first"]
        killed_pid = cluster.processes()[killed]
        os.kill(killed_pid, signal.SIGKILL)
        cluster.wait_for_event("samples_reassigned")
        cluster.wait_until("a replacement", lambda: cluster.processes().get(killed, killed_pid) != killed_pid)
        wait_pulled(cluster, killed, 2)
        go_on(cluster, 2)
        assert [row["cause"] for row in cluster.events("child_restarting")] == ["killed"]

    # the parent: its worker must not outlive it, and goes to a node that has come meanwhile
    cluster.join("third")
    moved = at_work(cluster, *nodes)["second"]
    orphan = cluster.processes()[moved]
    cluster.nodes["second"].kill()
    died_s = time.monotonic()
    cluster.wait_until("the end of its worker", lambda: gone(orphan), timeout_s=5.0)
    print(f"the worker outlived its node agent by {time.monotonic() - died_s:.2f} s")
    at_work(cluster, *nodes[:-1], "third")
    wait_pulled(cluster, moved, 2)
    go_on(cluster, 2)

    cluster.call("cancel")
    cluster.wait_until("the end", lambda: cluster.call("jobs")[0]["state"] == "interrupted")
    report = cluster.report()
    assert report.clean, [violation.what for violation in report.violations]
    returned = cluster.events("samples_returned")
    assert {row["worker"] for row in returned} == {killed, moved} - {""}
    assert sum(row["samples"] for row in returned) > 0
    last = cluster.rows()[-1]
    assert last["samples_migrated"] > 0
    assert (last["prompts_lost"], last["samples_trained_twice"]) == (0, 0)
    assert not cluster.events("samples_dropped")
    print(f"{last['samples_migrated']} samples moved in {last['step'] + 1} steps")

    cluster.close()
    cluster.settle("the end of all processes", lambda: not of_the_run(tmp_path), timeout_s=15.0)
