"""Jobs that share a training service, on real processes: its death, the head's, one that waits, what is refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_job import simulated_job

from actors.control.errors import BadConfig, NotNow
from actors.ledger.journal import committed_samples
from supervisors.testing.run_under_test import HeadraceCluster
from tests.free_ports import free_ports

SERVICES = {"services": [{"name": "train-0", "backend": "simulated", "memory_bytes": 10**9, "jobs_max": 2}]}
LONG, SHORT = 400, 4


@pytest.fixture
def cluster(headrace_cluster: Callable[..., HeadraceCluster], tmp_path: Path) -> HeadraceCluster:
    file = tmp_path / "services.yaml"
    file.write_text(yaml.safe_dump(SERVICES), encoding="utf-8")
    port = free_ports()
    return headrace_cluster(f"tcp://127.0.0.1:{port}", arguments=["--services", str(file)])


class Jobs:
    """The jobs of this head, by name."""

    def __init__(self, cluster: HeadraceCluster, model: Path) -> None:
        self.cluster, self._model = cluster, model
        self.directories: dict[str, Path] = {}

    def submit(self, name: str, steps: int, **trainer: Any) -> None:
        shared = {"backend": "simulated", "service": "train-0"} | trainer
        job = simulated_job(self._model, name=name, steps=steps, trainer=shared)
        job["rollout"] = job["rollout"] | {"workers": 1}
        answer = self.cluster.wait_until("an answer", lambda: self.cluster.call("submit", {"job": job}))
        self.directories[name] = Path(answer["run_dir"])

    def rows(self, name: str) -> int:
        file = self.directories[name] / "metrics.jsonl"
        return file.read_text("utf-8").count("\n") if file.exists() else 0

    def go_on(self, *names: str) -> None:
        """Wait until each has committed two steps more than now."""
        for name in names:
            self._goes_on(name, self.rows(name))

    def _goes_on(self, name: str, before: int) -> None:
        self.cluster.wait_until(f"progress of {name}", lambda: self.rows(name) > before + 1)

    def state(self, name: str) -> str:
        return next(row["state"] for row in self.cluster.call("jobs") if row["job"] == name)

    def every_sample_once(self, name: str) -> None:
        rows = committed_samples(self.directories[name] / "journal.db")
        names = [(row.step, row.prompt, row.sibling) for row in rows]
        assert names and len(names) == len(set(names))


def pid_of(cluster: HeadraceCluster, name: str) -> int:
    def look() -> int | None:
        return next((r["pid"] for r in cluster.call("tree") if r["name"] == name and r["state"] == "running"), None)

    return cluster.wait_until(f"{name} running", look)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_jobs_share_a_service_through_its_death_and_the_heads_and_the_one_that_waits_gets_its_turn(
    cluster: HeadraceCluster, small_model: Path
) -> None:
    jobs = Jobs(cluster, small_model)
    jobs.submit("first", LONG)
    jobs.submit("second", LONG)
    jobs.go_on("first", "second")
    jobs.submit("third", SHORT)

    def waits() -> list[str]:
        return [row["why"] for row in cluster.call("queue") if row["job"] == "third"]

    why = "queued: waits for a place on train-0, which serves 2 jobs of 2"
    assert cluster.wait_until("third queued", waits) == [why]
    assert jobs.state("third") == "queued"
    with pytest.raises(NotNow, match="train-0 is in use by first, second"):
        cluster.call("service_remove", {"service": "train-0"})
    with pytest.raises(BadConfig, match="'train-9' is no service of this head"):
        cluster.call("submit", {"job": simulated_job(small_model, name="x", trainer={"service": "train-9"})})

    os.kill(pid_of(cluster, "train-0"), signal.SIGKILL)
    jobs.go_on("first", "second")
    service = pid_of(cluster, "train-0")
    os.kill(pid_of(cluster, "head"), signal.SIGKILL)
    jobs.go_on("first", "second")
    assert cluster.wait_until("third queued again", waits) == [why]
    assert pid_of(cluster, "train-0") == service, "the next head takes it over"

    (row,) = cluster.call("services")
    assert (row["state"], row["serves"], row["steps"] > 0) == ("ready", "first, second", True)
    assert row["saving"] is not None and row["bubble"] is not None
    cluster.call("cancel", {"job": "first"})
    cluster.wait_until("third done", lambda: jobs.state("third") == "finished")
    cluster.call("cancel", {"job": "second"})
    cluster.wait_until("second over", lambda: jobs.state("second") == "interrupted")
    for name in ("first", "second", "third"):
        jobs.every_sample_once(name)
    cluster.wait_until("nobody there", lambda: cluster.call("services")[0]["serves"] == "")
    assert cluster.call("services")[0]["residency"] == "", "cancelled or finished: the service has dropped its state"
    assert cluster.call("service_remove", {"service": "train-0"})["state"] == "removed"
    assert cluster.call("services") == []
