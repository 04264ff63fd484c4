"""Real vLLM workers are killed, and what carries them: nothing is lost, they come back with the right weights, and no
process is left over.

There is no engine-core process to kill apart from the worker's: the core runs inside it (docs/decisions/0009). So what
dies by SIGKILL is the worker with its core, and the process of the node agent, with which its worker has to end.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from headrace_run import SMALL_JOB

from actors.control.client import ControlClient
from actors.control.errors import ControlError
from configs.schema import JobConfig
from supervisors.checkers.checks import check
from supervisors.checkers.run_directory import read_history
from supervisors.jobs.tiny_model import make_tiny_model
from tests.free_ports import free_ports

T = TypeVar("T")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

if importlib.util.find_spec("vllm") is None and os.environ.get("HEADRACE_REQUIRE_VLLM") != "1":
    pytest.skip(
        "vLLM is not installed; `make vllm` adds it, HEADRACE_REQUIRE_VLLM=1 makes this a failure",
        allow_module_level=True,
    )

JOB: dict[str, Any] = SMALL_JOB | {
    "steps": 100_000,
    "model": {"source": "tiny", "layers": 2, "warm_start_steps": 0},
    "algorithm": {"group_size": 4, "prompts_per_step": 4},
    "rollout": {"engine": "vllm", "workers": 2, "max_tokens": 64, "threads": 1, "max_running": 16},
    "checkpoint": {"every": 1000, "keep": 1000},
    "cluster": {"nodes": 3, "place_rollout": "remote"},
    "limits": {"ready_timeout_s": 400.0},
}


class Cluster:
    """A head and nodes, each a process; looked at over the control socket and in the run directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.run_dir = root
        self.control = f"ipc://{root}/c.sock"
        self.endpoint = f"tcp://127.0.0.1:{free_ports()}"
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, *arguments: str) -> None:
        with (self.root / f"{name}.log").open("w") as log:
            command = [sys.executable, "-u", "-m", "main", *arguments]
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, text=True)

    def add_node(self, name: str) -> None:
        self.start(name, "node", "--join", self.endpoint, "--name", name, "--slots", "1")

    def call(self, op: str, **args: Any) -> Any:
        async def ask() -> Any:
            async with ControlClient(self.control) as client:
                return await client.call(op, args, timeout_s=30.0)

        return asyncio.run(ask())

    def until(self, what: str, probe: Callable[[], T | None], timeout_s: float = 400.0) -> T:
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            try:
                if found := probe():
                    return found
            except (ControlError, OSError):
                pass  # the head is not there yet
            time.sleep(0.1)
        raise AssertionError(f"no {what} within {timeout_s} s; last events: {self.events()[-8:]}")

    def events(self, name: str = "") -> list[dict[str, Any]]:
        file = self.run_dir / "events.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [row for row in rows if name in ("", row["event"])]

    def workers(self) -> dict[str, tuple[str, int]]:
        """Node → worker and its process id, of those that run."""
        rows = self.call("tree")
        return {r["node"]: (r["name"], r["pid"]) for r in rows if r["role"] == "rollout" and r["state"] == "running"}

    def at_work(self, *nodes: str) -> dict[str, tuple[str, int]]:
        """Wait until exactly these nodes have a worker."""
        return self.until(f"workers on {nodes}", lambda: w if set(w := self.workers()) == set(nodes) else None)

    def steps(self) -> int:
        file = self.run_dir / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def go_on(self, steps: int) -> None:
        wanted = self.steps() + steps
        self.until(f"step {wanted}", lambda: self.steps() >= wanted)

    def pulled(self, worker: str, lives: int) -> Callable[[], object]:
        """Whether the ``lives``-th life of ``worker`` has registered and then served a version."""

        def look() -> object:
            rows = [row for row in self.events() if row.get("worker") == worker]
            begun = [i for i, row in enumerate(rows) if row["event"] == "worker_registered"]
            return len(begun) >= lives and any(row["event"] == "worker_version" for row in rows[begun[lives - 1] :])

        return look

    def close(self) -> None:
        """At once: what they have started has to end with them."""
        for process in self.processes.values():
            process.kill()
            process.wait(timeout=10)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


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


def test_vllm_workers_and_their_node_are_killed_and_every_sample_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    make_tiny_model(JobConfig.model_validate(JOB), tmp_path / "model")
    job = JOB | {"model": {"source": "hf", "path": str(tmp_path / "model")}}
    cluster.start("head", "head", "--listen", cluster.endpoint, "--control", cluster.control, "--dir", str(tmp_path))
    for name in ("first", "second", "third"):
        cluster.add_node(name)
    cluster.until("head", lambda: cluster.call("jobs") == [])
    cluster.run_dir = Path(cluster.call("submit", job=job)["run_dir"])
    before = cluster.at_work("first", "second")
    cluster.go_on(2)
    for node, (_, pid) in before.items():
        assert psutil.Process(pid).ppid() == cluster.processes[node].pid
        assert psutil.Process(pid).children() == [], "the engine core is no process of its own"

    # the worker and its core
    killed, killed_pid = before["first"]
    os.kill(killed_pid, signal.SIGKILL)
    cluster.until("the end of its samples there", lambda: cluster.events("samples_reassigned"))
    cluster.until("a replacement", lambda: cluster.workers().get("first", (killed, killed_pid))[1] != killed_pid)
    cluster.until("its version", cluster.pulled(killed, 2))
    cluster.go_on(2)
    assert [row["cause"] for row in cluster.events("child_restarting")] == ["killed"]

    # the parent: its worker must not outlive it, and goes to the node that is left
    moved, orphan = cluster.workers()["second"]
    cluster.processes["second"].kill()
    died_s = time.monotonic()
    cluster.until("the end of its worker", lambda: gone(orphan), timeout_s=5.0)
    print(f"the worker outlived its node agent by {time.monotonic() - died_s:.2f} s")
    cluster.at_work("first", "third")
    cluster.until("its version", cluster.pulled(moved, 2))
    cluster.go_on(2)

    cluster.call("cancel")
    cluster.until("the end", lambda: cluster.call("jobs")[0]["state"] == "interrupted")
    history = read_history(cluster.run_dir)
    report = check(history)
    assert report.clean, [violation.what for violation in report.violations]
    returned = cluster.events("samples_returned")
    assert {row["worker"] for row in returned} == {killed, moved}
    assert sum(row["samples"] for row in returned) > 0
    last = json.loads((cluster.run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["samples_migrated"] > 0
    assert (last["prompts_lost"], last["samples_trained_twice"]) == (0, 0)
    assert not cluster.events("samples_dropped")
    print(f"{last['samples_migrated']} samples moved in {last['step'] + 1} steps")

    cluster.close()
    cluster.until("the end of all processes", lambda: not of_the_run(tmp_path), timeout_s=15.0)
