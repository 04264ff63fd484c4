"""A head and nodes as processes of their own, over TCP; nodes come and go while a job runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from headrace_run import SMALL_JOB

from tests.free_ports import free_ports

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts ``headrace`` commands; they are killed at the end of the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-u", "-m", "main", *arguments]
        with (tmp_path / f"{arguments[0]}-{len(processes)}.log").open("w") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, text=True))
        return processes[-1]

    yield start
    for process in reversed(processes):
        process.terminate()
    for process in processes:
        process.wait(timeout=60)


class Control:
    """``headrace ctl`` against one endpoint."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def __call__(self, *arguments: str) -> Any:
        command = [sys.executable, "-m", "main", "ctl", "--control", self._endpoint, "--json", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode != 0:
            return None
        return json.loads(done.stdout.splitlines()[-1])

    def until(
        self, what: str, arguments: tuple[str, ...], holds: Callable[[Any], object], timeout_s: float = 150
    ) -> Any:
        until_s = time.monotonic() + timeout_s
        answer = None
        while time.monotonic() < until_s:
            answer = self(*arguments)
            if answer is not None and holds(answer):
                return answer
            time.sleep(0.1)
        raise AssertionError(f"no {what} within {timeout_s} s; last answer: {answer}")


def workers_on(tree: list[dict[str, Any]]) -> set[str]:
    return {row["node"] for row in tree if row["role"] == "rollout" and row["state"] == "running"}


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_nodes_leave_and_join_in_mid_run_and_the_job_finishes(start: Start, tmp_path: Path, small_model: Path) -> None:
    """Two nodes over TCP carry the rollout workers; one is told to go, another comes, its worker moves there."""
    endpoint = f"tcp://127.0.0.1:{free_ports()}"
    control = Control(f"ipc://{tmp_path}/c.sock")
    start("head", "--listen", endpoint, "--control", f"ipc://{tmp_path}/c.sock", "--dir", str(tmp_path / "runs"))
    first = start("node", "--join", endpoint, "--name", "first", "--slots", "1")
    start("node", "--join", endpoint, "--name", "second", "--slots", "1")
    job = SMALL_JOB | {
        "steps": 2000,
        "model": {"source": "hf", "path": str(small_model)},
        "cluster": {"nodes": 2, "place_rollout": "remote"},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    control.until("head", ("jobs",), lambda rows: rows == [])
    submitted = control("submit", str(tmp_path / "job.yaml"))
    metrics = Path(submitted["run_dir"]) / "metrics.jsonl"
    control.until("both nodes at work", ("tree",), lambda rows: workers_on(rows) == {"first", "second"})

    first.send_signal(signal.SIGTERM)
    start("node", "--join", endpoint, "--name", "third", "--slots", "1")
    control.until("the third node at work", ("tree",), lambda rows: workers_on(rows) == {"second", "third"})
    assert first.wait(timeout=30) == 0

    steps = len(metrics.read_text().splitlines())
    control.until("progress", ("jobs",), lambda rows: rows[0]["step"] > steps + 5)
    assert control("cancel")["state"] == "stopping"
    ended = control.until("the end", ("jobs",), lambda rows: rows[0]["state"] == "interrupted")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert ended[0]["step"] == len(rows)
    assert rows[-1]["prompts_lost"] == 0
    assert rows[-1]["samples_trained_twice"] == 0


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_head_that_serves_jobs_is_killed_and_its_next_life_goes_on_with_them_on_the_same_nodes(
    start: Start, tmp_path: Path, small_model: Path
) -> None:
    """The nodes join again, with what they run: every role process is the one that it was."""
    endpoint = f"tcp://127.0.0.1:{free_ports()}"
    control = Control(f"ipc://{tmp_path}/c.sock")
    start("head", "--listen", endpoint, "--control", f"ipc://{tmp_path}/c.sock", "--dir", str(tmp_path / "runs"))
    for name in ("first", "second"):
        start("node", "--join", endpoint, "--name", name, "--slots", "1")
    job = SMALL_JOB | {
        "steps": 2000,
        "model": {"source": "hf", "path": str(small_model)},
        "cluster": {"nodes": 2, "place_rollout": "remote"},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    control.until("head", ("jobs",), lambda rows: rows == [])
    control("submit", str(tmp_path / "job.yaml"))
    control.until("work", ("jobs",), lambda rows: rows[0]["step"] > 2)
    before = processes_in(control("tree"))
    assert {node for node, _ in before.values()} == {"head", "first", "second"}

    os.kill(before.pop("head")[1], signal.SIGKILL)
    control.until("another head", ("tree",), lambda rows: before.items() <= processes_in(rows).items())
    step = control.until("its job", ("jobs",), lambda rows: rows[0]["state"] == "running")[0]["step"]
    control.until("progress", ("jobs",), lambda rows: rows[0]["step"] > step + 5)
    assert before.items() <= processes_in(control("tree")).items(), "nobody was started again"
    assert control("cancel")["state"] == "stopping"
    [ended] = control.until("the end", ("jobs",), lambda rows: rows[0]["state"] == "interrupted")
    rows = [json.loads(line) for line in (Path(ended["run_dir"]) / "metrics.jsonl").read_text().splitlines()]
    assert (rows[-1]["prompts_lost"], rows[-1]["samples_trained_twice"]) == (0, 0)
    register = tmp_path / "runs" / "head.jobs.json"  # the job leaves it once its processes are down
    control.until("its processes down", ("jobs",), lambda _: json.loads(register.read_text()) == [])


def processes_in(tree: list[dict[str, Any]]) -> dict[str, tuple[str, int]]:
    """Name → node and process id of every process that runs."""
    return {
        r["name"]: (r["node"], r["pid"]) for r in tree if r["pid"] and r["state"] == "running" and "." not in r["name"]
    }


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_a_node_whose_head_is_gone_leaves_at_once_when_it_is_told_to(start: Start, tmp_path: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{free_ports()}"
    control = Control(f"ipc://{tmp_path}/c.sock")
    head = start("head", "--listen", endpoint, "--control", f"ipc://{tmp_path}/c.sock", "--dir", str(tmp_path / "runs"))
    node = start("node", "--join", endpoint, "--name", "first", "--slots", "1")
    control.until("the node", ("tree",), lambda rows: any(row["node"] == "first" for row in rows))
    head.kill()
    head.wait(timeout=10)
    time.sleep(2.5)  # it has noticed, and looks for the next one
    told_s = time.monotonic()
    node.terminate()
    assert node.wait(timeout=30) == 0
    assert time.monotonic() - told_s < 4.0
