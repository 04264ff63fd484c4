"""Another user of the machine attacks a run that lives: everything is refused, what can be seen is logged, it goes on.

One run is open as far as runs are: a node joins over TCP on loopback, and the control socket is there, too. The other
has Unix sockets only. The attacker is a child of the test that has become another user; it knows every path, port and
public key.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import tempfile
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgpack
import pytest
import zmq
from small_job import simulated_job

from actors.weights.segments import memory_of, path_id, run_id, segment_directory
from supervisors.testing.run_under_test import HeadraceRun
from tests.free_ports import free_ports
from transport.address import PeerId
from transport.zmq.handshake import CODEC, PROTOCOL_VERSION, Hello, Mark, control, routing_id
from transport.zmq.own_keys import own_keys_directory
from transport.zmq.security import load_keys

ATTACKER: Final = 4711
PATIENCE_MS: Final = 1500
REFUSALS: Final = (
    "a key that is not allowed is refused",
    "a connection without the right keys is refused",
    "a control client without the right keys is refused",
)
"""What the head's log says of strangers; at a Unix socket it is the system that refuses."""

Attack = Callable[[], object]


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A place that others can enter, as homes of many machines are."""
    directory = Path(tempfile.mkdtemp(prefix="headrace-tests-", dir="/tmp"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def as_another_user(attacks: dict[str, Attack]) -> dict[str, str]:
    """What came of each attack: ``refused``, or what it got."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        came: dict[str, str] = {}
        try:
            os.setgroups([])
            os.setgid(ATTACKER)
            os.setuid(ATTACKER)
            for name, attack in attacks.items():
                try:
                    came[name] = f"got {attack()!r:.300}"
                except (PermissionError, TimeoutError):
                    came[name] = "refused"
                except Exception:
                    came[name] = traceback.format_exc()
            os.write(write, json.dumps(came).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text)


def ask(address: str, frames: list[bytes], *, server: bytes | None, route: bytes | None = None) -> list[bytes]:
    """What a listener answers to a stranger: one without keys, or with a pair of its own making.

    Raises:
        TimeoutError: nothing.
    """
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    if route is not None:
        dealer.setsockopt(zmq.ROUTING_ID, route)
    if server is not None:
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
        dealer.curve_serverkey = server
    dealer.connect(address)
    dealer.send_multipart(frames)
    try:
        if not dealer.poll(PATIENCE_MS):
            raise TimeoutError
        return dealer.recv_multipart()
    finally:
        context.destroy(linger=0)


def attacks_over_tcp(nodes: str, control_at: str) -> dict[str, Attack]:
    """At the ports of a head: with no keys, and with a pair of the attacker's own."""
    nodes_key, control_key = (load_keys(own_keys_directory(side)).public for side in ("nodes", "control"))
    peer = PeerId("head.small.trainer", 99)
    hello = Hello(PROTOCOL_VERSION, CODEC, "headrace", peer.name, peer.incarnation, "tcp://127.0.0.1:1", 1)
    greeting = [bytes(frame) for frame in control(Mark.HELLO, hello)]
    cancel = [msgpack.packb({"v": 1, "id": 1, "op": "cancel", "args": {}})]
    run_code = {"name": "x", "steps": 1, "reward": {"kind": "function", "function": "os:execlp"}}
    submit = [msgpack.packb({"v": 1, "id": 1, "op": "submit", "args": {"job": run_code}})]
    return {
        "read the nodes' secret": lambda: (own_keys_directory("nodes") / "node.secret").read_bytes(),
        "read the operators' secret": lambda: (own_keys_directory("control") / "node.secret").read_bytes(),
        "join without keys": lambda: ask(nodes, greeting, server=None, route=routing_id(peer, 1)),
        "join with other keys": lambda: ask(nodes, greeting, server=nodes_key, route=routing_id(peer, 1)),
        "cancel without keys": lambda: ask(control_at, cancel, server=None),
        "cancel with other keys": lambda: ask(control_at, cancel, server=control_key),
        "submit code without keys": lambda: ask(control_at, submit, server=None),
        "submit code with other keys": lambda: ask(control_at, submit, server=control_key),
    }


def attacks_on(run: HeadraceRun, sockets: list[str], victim: Path) -> dict[str, Attack]:
    """Everything else that somebody who only lives on the machine can try."""
    run_dir, memory = run.run_dir, memory_of(run_id(run.run_dir))

    def connect(path: str) -> Attack:
        def attack() -> object:
            with socket.socket(socket.AF_UNIX) as end:
                end.connect(path)
                return "a connection"

        return attack

    attacks: dict[str, Attack] = {
        "list the run": lambda: os.listdir(run_dir),
        "list the memory": lambda: os.listdir(memory),
        "plant in the memory": lambda: (memory / "headrace-v9.partial").symlink_to(victim),
        "plant in the run": lambda: (run_dir / "metrics.jsonl.1").symlink_to(victim),
        "replace the run": lambda: run_dir.rename(run_dir.with_name("mine")),
        "replace the memory": lambda: memory.rename(memory.with_name("mine")),
        "signal the command": lambda: os.kill(run.process.pid, signal.SIGTERM),
    }
    for file in [path for path in run_dir.rglob("*") if path.is_file()]:
        attacks[f"read {file.relative_to(run_dir)}"] = lambda file=file: file.open("rb").read(10)
        attacks[f"write {file.relative_to(run_dir)}"] = lambda file=file: file.open("ab")
    for file in memory.iterdir():
        attacks[f"map {file.name}"] = lambda file=file: file.open("rb").read(10)
    for name, pid in run.processes().items():
        attacks[f"signal {name}"] = lambda pid=pid: os.kill(pid, signal.SIGKILL)
    for path in sockets:
        attacks[f"connect to {path}"] = connect(path)
    return attacks


def sockets_of(pids: set[int]) -> list[str]:
    """Unix sockets at which these processes listen, by path."""
    inodes = set[str]()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return sorted({words[7] for words in lines if len(words) > 7 and words[6] in inodes and words[7].startswith("/")})


@pytest.mark.cluster
@pytest.mark.timeout(300)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("over", ["tcp", "unix"])
def test_another_user_of_the_machine_is_refused_everything_and_the_run_goes_on(
    small_model: Path, open_directory: Path, over: str
) -> None:
    nodes, control_at = (f"tcp://127.0.0.1:{free_ports()}" for _ in range(2))
    victim = open_directory / "victim"
    victim.write_text("precious")
    old_name = path_id(open_directory / "run")  # what shared memory of older versions was called
    planted = [segment_directory() / f"headrace-{old_name}-v{version}.partial" for version in range(3)]
    for link in planted:
        link.symlink_to(victim)
    cluster = {"nodes": 1, "place_rollout": "spread", "listen": nodes} if over == "tcp" else {}
    job = simulated_job(small_model, steps=2000, cluster=cluster)
    run = HeadraceRun(open_directory / "run", job, arguments=["--control", control_at] if over == "tcp" else [])
    try:
        if over == "tcp":
            run.add_node("other", nodes)
        run.wait_for_step(2)
        sockets = sockets_of({run.process.pid, *(node.pid for node in run.nodes.values()), *run.processes().values()})
        attacks = attacks_on(run, sockets, victim) | (attacks_over_tcp(nodes, control_at) if over == "tcp" else {})
        assert len(attacks) > 40
        assert over == "tcp" or len(sockets) > 10
        came = as_another_user(attacks)
        assert {name: what for name, what in came.items() if what != "refused"} == {}
        assert len(came) == len(attacks)

        for path in [run.run_dir, *run.run_dir.rglob("*"), *memory_of(run_id(run.run_dir)).iterdir()]:
            if not path.is_symlink() and path.exists():
                assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
        said = (run.run_dir / "logs" / "head.log").read_text()
        for line in REFUSALS if over == "tcp" else ():
            assert line in said
        run.wait_for_step(len(run.rows()) + 3)
        assert run.call("cancel")["state"] == "stopping"
        summary: dict[str, Any] = run.finish(state="interrupted")
        assert (summary["prompts_lost"], summary["samples_trained_twice"], summary["restarts"]) == (0, 0, 0)
        assert victim.read_text() == "precious"
    finally:
        run.close()
        for link in planted:
            link.unlink(missing_ok=True)


def taken_within(port: int, seconds: float) -> Attack:
    """Tries to have the port of loopback, over and over, and tells how often that was refused."""

    def attack() -> object:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            with socket.socket() as stranger, contextlib.suppress(OSError):
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                stranger.bind(("127.0.0.1", port))
                stranger.listen()
                return "the port"
        raise PermissionError

    return attack


@pytest.mark.cluster
@pytest.mark.timeout(300)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_have_the_gateways_port_while_it_is_dead_and_agents_find_it_again(
    small_model: Path, open_directory: Path
) -> None:
    job = simulated_job(small_model, environment={"kind": "external"}, reward={})
    run = HeadraceRun(open_directory / "run", job)
    try:
        endpoint, key = run.run_dir / "gateway.endpoint", run.run_dir / "gateway.key"
        base = run.wait_until("gateway", lambda: endpoint.exists() and endpoint.read_text().strip())

        def models() -> int:
            asked = urllib.request.Request(f"{base}/models", headers={"x-api-key": key.read_text().strip()})
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return answer.status

        assert models() == 200
        for _ in range(2):
            pid = run.processes()["gateway"]
            threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
            came = as_another_user({"have the port": taken_within(int(base.split(":")[2].split("/")[0]), 4.0)})
            assert came == {"have the port": "refused"}
            assert models() == 200  # asked while it was away, or soon after: it is answered by the next life
            run.wait_until("another gateway", lambda pid=pid: run.processes().get("gateway", pid) != pid)
        assert endpoint.read_text().strip() == base
    finally:
        run.close()
