"""A supervisor whose process was killed: its successor adopts the role processes that still run, and hears of them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil

from actors.core.context import Context
from actors.core.system import ActorSystem
from actors.roles import RoleArgs
from configs.limits import Limits
from supervisors.jobs.adoption import adopt
from supervisors.machine.devices import Devices
from supervisors.machine.machine import LocalMachine
from supervisors.machine.membership.nodes import Nodes
from supervisors.machine.node_agent import NodeAgent, NodeOptions
from supervisors.tree.children import ChildSpec, Running, start_process
from supervisors.tree.restart_budget import ExitCause
from supervisors.tree.strategies import Strategy
from supervisors.tree.supervisor import SupervisionEvent, Supervisor
from tests.smallest_job import smallest_job
from transport.address import ActorAddress, PeerId
from transport.zmq.transport import ZmqTransport

HERE = Path(__file__).parent
THREE = ("0", "1", "2")
LIMITS = Limits(backoff_first_s=0.01, orphan_grace_s=20.0, stop_timeout_s=5.0)
NOWHERE = ActorAddress("nobody", PeerId("nowhere", 1))
JOB = smallest_job().model_dump_json()


def _sees(pid: int) -> str:
    """What the process was started with."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(v.partition(b"=")[2].decode() for v in variables if v.startswith(b"CUDA_VISIBLE_DEVICES="))


class HeadLife:
    """One life of the head: the register of nodes and a supervisor of three processes."""

    def __init__(self, incarnation: int, run_dir: Path, agent: ActorAddress, listen: str) -> None:
        self.links = ZmqTransport(PeerId("head", incarnation), listen=listen, cluster="test", limits=LIMITS)
        self.system = ActorSystem(self.links, limits=LIMITS)
        self.nodes = Nodes("head")
        self.nodes.add_local("n1", agent, slots=4, devices=THREE)
        self.events: list[SupervisionEvent] = []
        self._run_dir, self._agent = run_dir, agent

    async def start(self) -> Supervisor:
        await self.system.start()
        await self.system.spawn("nodes", self.nodes)
        supervisor = Supervisor(
            "fleet", Strategy.ONE_FOR_ONE, [self._child(n) for n in ("p0", "p1", "p2")], on_event=self.events.append
        )
        await self.system.spawn("fleet", supervisor)
        await supervisor.ready(30)
        return supervisor

    def _child(self, name: str) -> ChildSpec:
        args = RoleArgs(role="probe", name=name, node="", job=JOB, model_path="", run_dir=str(self._run_dir),
                        scheduler=NOWHERE, metrics=NOWHERE)  # fmt: skip
        first = True

        async def start(context: Context) -> Running:
            nonlocal first
            look, first = first, False
            if look and (running := await adopt(context, self.nodes, f"j.{name}", name)) is not None:
                return running
            await self.nodes.choose(f"j.{name}", "local", 1.0, devices=1)
            return await start_process(context, self._agent, args, job="j", devices=self.nodes.devices_of(f"j.{name}"))

        return ChildSpec(name, start)

    @property
    def devices(self) -> dict[str, tuple[str, ...] | None]:
        """As the register knows them."""
        return {name: self.nodes.devices_of(f"j.{name}") for name in ("p0", "p1", "p2")}

    def kinds(self, child: str) -> list[str]:
        return [event.kind for event in self.events if event.child == child]

    async def until(self, child: str, kind: str) -> SupervisionEvent:
        async with asyncio.timeout(20):
            while kind not in self.kinds(child):
                await asyncio.sleep(0.01)
        return next(event for event in self.events if (event.child, event.kind) == (child, kind))


async def test_the_next_head_adopts_what_runs_and_starts_what_has_ended_meanwhile(tmp_path: Path) -> None:
    machine = ActorSystem(ZmqTransport(PeerId("machine", 1), listen="ipc://*", cluster="test", limits=LIMITS))
    await machine.start()
    command = [sys.executable, "-P", str(HERE.parent / "machine" / "probe_child.py")]
    machine_of_three = LocalMachine(Devices(THREE))
    agent = await machine.spawn(
        "agent", NodeAgent("n1", NodeOptions(cluster="test", command=command, machine=machine_of_three))
    )
    directory = tmp_path / "s"
    directory.mkdir(mode=0o700)
    first = HeadLife(21, tmp_path, agent.address, f"ipc://{directory}/head")
    supervisor = await first.start()
    before = {info.name: info.pid for info in supervisor.snapshot()}
    assert first.kinds("p0") == ["started"], "there was nothing to adopt"
    given = first.devices
    assert sorted(given.values(), key=str) == [("0",), ("1",), ("2",)], "the least used one each"
    assert {name: _sees(pid) for name, pid in before.items()} == {name: own[0] for name, own in given.items() if own}
    first.links.abort()
    os.kill(before["p2"], signal.SIGKILL)
    await asyncio.sleep(0.5)

    second = HeadLife(22, tmp_path, agent.address, f"ipc://{directory}/head")
    supervisor = await second.start()
    after = {info.name: info.pid for info in supervisor.snapshot()}
    assert (after["p0"], after["p1"]) == (before["p0"], before["p1"])
    assert after["p2"] != before["p2"]
    assert {name: second.kinds(name) for name in after} == {"p0": ["adopted"], "p1": ["adopted"], "p2": ["started"]}
    assert supervisor.restarts == 0
    assert second.devices == given, "who runs keeps its device, and what is started has the one that is left"
    assert _sees(after["p2"]) == ",".join(given["p2"] or ())

    os.kill(after["p0"], signal.SIGKILL)  # the new owner hears of it, and replaces it
    exited = await second.until("p0", "exited")
    assert exited.cause is ExitCause.KILLED
    await second.until("p0", "started")
    await second.system.stop()
    await first.system.stop()
    await machine.stop()
    assert not psutil.Process().children()
