"""A run that is open to other machines: nodes join with keys, operators steer with others, the rest get no word."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_job import SMALL_JOB, simulated_job

from supervisors.testing.run_under_test import HeadraceCluster, HeadraceRun
from tests.free_ports import free_ports
from transport.own_address import own_address
from transport.zmq.security import load_keys

StartRun = Callable[..., HeadraceRun]
StartCluster = Callable[..., HeadraceCluster]


def headrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Key directories made by the command: head, node, control, its clients alice and bob, and eve, a stranger."""
    home = tmp_path_factory.mktemp("keys")
    public = {name: headrace("keys", str(home / name)).stdout.strip() for name in ("head", "node", "eve")}
    for own, other in (("head", "node"), ("node", "head")):
        assert headrace("keys", str(home / own), "--allow", f"{other}={public[other]}").returncode == 0
    made = headrace("keys", str(home / "control"), "--operator", str(home / "alice"), "--reader", str(home / "bob"))
    assert made.returncode == 0, made.stderr
    return home


class Ctl:
    """``headrace ctl`` of somebody."""

    def __init__(self, control: str, keys: Path | None) -> None:
        self._head = [
            "ctl",
            "--control",
            control,
            "--timeout",
            "20",
            *(["--keys", str(keys)] if keys else []),
            "--json",
        ]

    def __call__(self, *arguments: str) -> Any:
        done = headrace(*self._head, *arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def refused(self, *arguments: str) -> tuple[int, str]:
        done = headrace(*self._head, *arguments)
        assert done.stdout == ""
        return done.returncode, done.stderr

    def until(self, what: str, seen: Callable[[Any], bool], *arguments: str) -> None:
        until_s = time.monotonic() + 180
        while True:
            done = headrace(*self._head, *arguments)
            if done.returncode == 0 and seen(json.loads(done.stdout.splitlines()[-1])):
                return
            assert time.monotonic() < until_s, f"no {what}: {done.stdout}{done.stderr}"
            time.sleep(0.5)  # a command costs as much processor time as the run that it waits for


@pytest.mark.timeout(400)
def test_a_run_on_all_interfaces_obeys_its_operator_shows_its_reader_and_ignores_the_rest(
    headrace_run: StartRun, small_model: Path, keys: Path
) -> None:
    nodes, control = free_ports(), free_ports()
    place = {"nodes": 1, "place_rollout": "remote", "listen": f"tcp://0.0.0.0:{nodes}"}
    job = simulated_job(small_model, steps=5000, cluster=place)
    words = ("--keys", str(keys / "head"), "--control", f"tcp://0.0.0.0:{control}", "--control-keys")
    run = headrace_run(job, arguments=[*words, str(keys / "control")])
    run_dir = run.run_dir
    join = f"tcp://127.0.0.1:{nodes}?key={load_keys(keys / 'head').public_hex}"
    run.add_node("node-far", join, "--keys", str(keys / "node"), slots=2)

    alice, bob = Ctl(str(run_dir), keys / "alice"), Ctl(str(run_dir), keys / "bob")
    run.wait_for_step(2)
    alice.until("work", lambda rows: rows[0]["step"] > 2, "jobs")
    assert {row["node"] for row in alice("tree") if row["role"] == "rollout"} == {"node-far"}
    assert alice("scale", "1")["workers"] == 1

    bob.until("progress", lambda rows: rows[0]["workers"] == 1, "jobs")
    code, why = bob.refused("cancel")
    assert (code, "may only look" in why) == (1, True)

    endpoint = (run_dir / "control.endpoint").read_text().strip()
    assert endpoint.startswith(f"tcp://127.0.0.1:{control}?key=")
    for stranger in ("eve", "node", "head"):  # a node's key is good for work, not for steering
        code, why = Ctl(str(run_dir), keys / stranger).refused("cancel")
        assert (code, "does not allow this client's key" in why) == (1, True), why
    code, why = Ctl(str(run_dir), None).refused("cancel")
    assert (code, "wants keys" in why) == (2, True), why
    code, why = Ctl(endpoint.partition("?")[0], None).refused("cancel")
    assert (code, "only one of server and client has keys" in why) == (1, True), why
    with socket.create_connection(("127.0.0.1", control), timeout=5) as tcp:
        tcp.sendall(os.urandom(5000))

    run.wait_for_step(len(run.rows()) + 5)  # it goes on after all that
    assert alice("cancel")["state"] == "stopping"
    summary = run.finish(state="interrupted")
    assert (summary["prompts_lost"], summary["samples_trained_twice"], summary["restarts"]) == (0, 0, 0)


@pytest.mark.timeout(400)
def test_a_head_on_all_interfaces_takes_jobs_of_its_operator_only(
    headrace_cluster: StartCluster, tmp_path: Path, keys: Path
) -> None:
    """The server's own pair is an operator's; the endpoint that is printed names its address."""
    port = free_ports()
    words = ("--control", f"tcp://0.0.0.0:{port}", "--control-keys", str(keys / "control"))
    cluster = headrace_cluster("tcp://127.0.0.1:*", arguments=words)
    own, bob = (Ctl(str(cluster.directory), keys / client) for client in ("control", "bob"))
    own.until("an answer", lambda rows: rows == [], "jobs")
    (tmp_path / "job.yaml").write_text(
        yaml.safe_dump(SMALL_JOB | {"model": {"source": "tiny", "warm_start_steps": 50_000}})
    )
    code, why = bob.refused("submit", str(tmp_path / "job.yaml"))
    assert (code, "may only look" in why) == (1, True)
    assert own("submit", str(tmp_path / "job.yaml"))["job"] == "small"
    assert [row["job"] for row in bob("jobs")] == ["small"]
    assert own("cancel")["state"] == "interrupted"  # its model is being made: it need not wait for that
    bob.until("the end", lambda rows: rows[0]["state"] == "interrupted", "jobs")
    cluster.process.terminate()
    assert cluster.process.wait(timeout=120) == 0
    assert f"tcp://{own_address()}:{port}?key=" in cluster.last_words()
