"""The process that keeps a head alive: which ends it forgives, and when it has had enough."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from actors.core.system import ActorSystem
from configs.limits import Limits
from supervisors.head import machine_process
from supervisors.head.head_messages import (
    FormerJob,
    HeadBeacon,
    HeadEnded,
    HeadHeard,
    HeadOrder,
    HeadProgress,
    HeadReady,
)
from supervisors.head.machine_process import HeadKeeper, MachineProcess
from supervisors.machine.membership.node import NodeProcess
from supervisors.tree.errors import HeadGaveUp
from tests.simulated import run_simulated
from transport.address import ActorAddress, PeerId
from transport.errors import InsecureBind
from transport.memory_transport import MemoryNetwork, MemoryTransport

LIMITS = Limits(backoff_first_s=0.01, backoff_max_s=0.02, restart_max=2, stop_timeout_s=5.0)
NOBODY = ActorAddress("", PeerId("", 0))


def order(run_dir: Path) -> HeadOrder:
    log = str(run_dir / "logs" / "head.log")
    return HeadOrder(
        life=1,
        run_root=str(run_dir),
        directory=str(run_dir),
        listen="",
        control="",
        log=log,
        agent=NOBODY,
        keeper=NOBODY,
        limits="",
    )


def lead(
    monkeypatch: pytest.MonkeyPatch, run_dir: Path, program: str, limits: Limits = LIMITS
) -> tuple[str, list[dict[str, Any]]]:
    """Keep a head alive that runs ``program``; why it was given up, and what was told meanwhile."""
    told: list[Any] = []
    monkeypatch.setattr(machine_process, "head_command", lambda: [sys.executable, "-S", "-c", program])
    machine = MachineProcess(listen=None, limits=limits, on_progress=told.append, on_ready=told.append)

    async def main() -> None:
        try:
            await machine.start()
            await machine.lead(order(run_dir), asyncio.Event())
        finally:
            await machine.stop()

    with pytest.raises(HeadGaveUp) as error:
        asyncio.run(main())
    return str(error.value), told


async def test_what_could_not_be_started_can_be_stopped_and_the_cause_is_what_is_told() -> None:
    """To stop it is in the way of every error: one of its own would hide the one that counts."""
    deaf = "tcp://192.0.2.1:7001"  # nobody's address, and without keys
    machine = MachineProcess(listen=deaf, limits=LIMITS, on_progress=lambda _: None, on_ready=lambda _: None)
    node = NodeProcess(join=deaf, name="n", slots=1, keys=None)
    for process in (machine, node):
        with pytest.raises(InsecureBind):
            await process.start()
        await process.stop()


def test_a_head_that_is_never_ready_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    why, told = lead(monkeypatch, tmp_path, "import sys; print('no luck', file=sys.stderr); sys.exit(3)",
                     LIMITS.model_copy(update={"restart_max": 9}))  # fmt: skip
    assert why.startswith("3 starts of the head in a row failed")
    assert "exit code 3" in why and "no luck" in why
    assert len(told) == 2, "each new start was told"


def test_a_head_that_says_why_it_cannot_start_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = "import sys; print('InsecureBind: no keys', file=sys.stderr); sys.exit(71)"
    assert lead(monkeypatch, tmp_path, program) == ("InsecureBind: no keys", [])


LAST_WORDS = """
import json, os, sys
note = {{"error": "JournalUnreadable", "message": "journal.db: no space", "permanent": {permanent}}}
os.write(int(os.environ["HEADRACE_EXIT_NOTE"]), json.dumps(note).encode())
sys.exit(70)
"""


def test_a_head_that_can_only_meet_the_same_error_again_is_given_up_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    why, told = lead(monkeypatch, tmp_path, LAST_WORDS.format(permanent="True"))
    assert why.startswith("JournalUnreadable: journal.db: no space") and told == []


def test_what_a_head_has_named_as_its_end_is_what_people_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    why, told = lead(monkeypatch, tmp_path, LAST_WORDS.format(permanent="False"))
    assert "JournalUnreadable: journal.db: no space" in why
    assert all("JournalUnreadable: journal.db: no space" in news["message"] for news in told) and told


def test_a_stopped_head_is_killed_although_it_was_never_ready(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    began_s = time.monotonic()
    limits = LIMITS.model_copy(update={"start_attempts_max": 1})
    why, told = lead(monkeypatch, tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", limits)
    assert "SIGKILL" in why
    assert "stopped by a signal" in told[0]["message"]
    assert time.monotonic() - began_s < 10


def test_an_earlier_life_of_the_head_is_not_heard() -> None:
    async def scenario() -> None:
        told: list[Any] = []
        system = ActorSystem(MemoryTransport(MemoryNetwork(), PeerId("machine", 1)), limits=LIMITS)
        await system.start()
        keeper = HeadKeeper(told.append, told.append)
        ref = await system.spawn("keeper", keeper)
        keeper.expect(2)
        ref.tell(HeadReady(life=1, endpoint="e", control="c"))
        ref.tell(HeadProgress(life=1, fields={"of_job": "j", "step": 9}))
        await ref.ask(HeadEnded(life=1, summary={"state": "failed"}), HeadHeard)
        assert (keeper.ready, keeper.jobs, keeper.steps, keeper.summary, told) == (None, {}, 0, None, [])
        ref.tell(HeadReady(life=2, endpoint="e", control="c"))
        ref.tell(HeadProgress(life=2, fields={"of_job": "j", "step": 4, "restarts": 1}))
        await ref.ask(HeadEnded(life=2, summary={"state": "finished"}), HeadHeard)
        assert (keeper.jobs, keeper.steps) == ({"j": FormerJob(step=4, restarts=1)}, 1)
        assert keeper.summary == {"state": "finished"}
        assert len(told) == 2
        for nodes in (("a", "b"), ("a", "b"), ("b",)):
            ref.tell(HeadBeacon(life=2, nodes=nodes))
        ref.tell(HeadBeacon(life=1, nodes=("c",)))
        await ref.ask(HeadEnded(life=1, summary={}), HeadHeard)
        assert told[2:] == [{"joined_nodes": "a,b"}, {"joined_nodes": "b"}], "changes are passed on"
        await system.stop()

    run_simulated(scenario())


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("address", "host", "family"),
    [
        ("tcp://127.0.0.1", "127.0.0.1", socket.AF_INET),
        ("tcp://*", "", socket.AF_INET),
        pytest.param(
            "tcp://[::1]", "::1", socket.AF_INET6,
            marks=pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6"),
        ),
    ],
)  # fmt: skip
def test_a_wildcard_port_becomes_one_that_the_next_life_finds_again(
    address: str, host: str, family: socket.AddressFamily
) -> None:
    fixed = machine_process.fixed_listen(f"{address}:*")
    port = int(fixed.removeprefix(f"{address}:"))
    for lane in range(3):
        with socket.socket(family) as free:
            free.bind((host, port + lane))


def test_an_endpoint_that_names_its_port_or_has_none_stays_as_it_is() -> None:
    assert machine_process.fixed_listen("tcp://127.0.0.1:7001") == "tcp://127.0.0.1:7001"
    assert machine_process.fixed_listen("ipc:///x/y") == "ipc:///x/y"
