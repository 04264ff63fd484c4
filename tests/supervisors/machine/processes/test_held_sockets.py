"""The address of a process outlives it: whoever connects between two lives is answered by the second."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path

import pytest

from actors.gateway.listening import VARIABLE, open_listeners
from actors.roles import RoleArgs
from configs.episode_schema import GatewayConfig
from supervisors.machine.machine import LocalMachine
from supervisors.machine.processes.held_sockets import HeldSockets, Listening, listening_of
from supervisors.machine.processes.process import Launch
from supervisors.tree.restart_budget import ExitCause
from tests.smallest_job import smallest_job
from transport.address import ActorAddress, PeerId

SERVE = f"""
import os, socket
one = socket.socket(fileno=int(os.environ["{VARIABLE}"].split(" ")[0]))
while True:
    client, _ = one.accept()
    client.sendall(str(os.getpid()).encode())
    client.close()
"""


def bound(port: int) -> bool:
    """Whether somebody else can have the port."""
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            stranger.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


async def asked(port: int) -> int:
    """Process that answers at the port."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(10.0):
        said = await reader.read()
    writer.close()
    return int(said)


def at(directory: Path, port: int = 0) -> Listening:
    return Listening("j.gateway", GatewayConfig(port=port), directory)


async def test_between_two_lives_nobody_can_take_the_port_and_who_connects_is_answered_by_the_next(
    tmp_path: Path,
) -> None:
    machine = LocalMachine()
    launch = Launch([sys.executable, "-c", SERVE], tmp_path / "log")
    first = machine.launch(launch, at(tmp_path))
    port = machine._held._held["j.gateway"][1].port
    try:
        assert await asked(port) == first.pid
        first.kill(ExitCause.KILLED)
        await first.gone()
        assert not bound(port)
        waiting = asyncio.create_task(asked(port))
        second = machine.launch(launch, at(tmp_path))
        assert await waiting == second.pid != first.pid
        second.kill(ExitCause.KILLED)
        await second.gone()
    finally:
        machine.let_go("j.gateway")
    assert bound(port)


def test_a_process_without_an_address_of_its_own_inherits_none_and_one_that_is_taken_is_left_to_it(
    tmp_path: Path,
) -> None:
    args = RoleArgs(
        role="gateway", name="gateway", node="n", job=smallest_job().model_dump_json(), model_path="", run_dir="",
        scheduler=ActorAddress("s", PeerId("p", 1)), metrics=ActorAddress("m", PeerId("p", 1)),
    )  # fmt: skip
    assert listening_of("j.gateway", args) is not None
    held, plain = HeldSockets(), Launch(["x"], tmp_path / "log")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert held.given(plain, at(tmp_path, other.getsockname()[1])) is plain
    given = [held.given(plain, at(tmp_path)) for _ in range(2)]
    assert given[0] == given[1] and len(given[0].inherited) == 1
    moved = held.given(plain, at(tmp_path / "other"))
    assert len(moved.inherited) == 1
    held.let_go("j.gateway")
    held.let_go("j.gateway")
    with pytest.raises(OSError, match=r"."):
        os.fstat(moved.inherited[0])


def test_the_port_of_an_earlier_machine_process_is_taken_again(tmp_path: Path) -> None:
    first = open_listeners(GatewayConfig(), tmp_path)
    (tmp_path / "gateway.endpoint").write_text(f"http://127.0.0.1:{first.port}/v1\n")
    port = first.port
    first.close()
    again = open_listeners(GatewayConfig(), tmp_path)
    assert (again.port, again.moved) == (port, False)
    again.close()
    named = open_listeners(GatewayConfig(host="localhost", port=port), tmp_path)
    assert {one.getsockname()[1] for one in named.sockets} == {port}
    named.close()
