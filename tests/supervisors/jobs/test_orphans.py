"""Processes that are being stopped because their owner stayed away too long, when its successor comes after all."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from actors.core.context import Context
from actors.core.ref import ActorRef
from actors.core.system import ActorSystem
from actors.roles import RoleArgs
from configs.limits import Limits
from supervisors.jobs.adoption import adopt
from supervisors.machine.machine import LocalMachine
from supervisors.machine.membership.nodes import Nodes
from supervisors.machine.node_agent import NodeAgent, NodeOptions
from supervisors.machine.processes.held_sockets import Listening
from supervisors.machine.processes.process import Child, Launch
from supervisors.machine.processes.process_spec import ProcessSpec
from supervisors.tree.children import ChildSpec, Running, start_process
from supervisors.tree.messages import ProcessReady
from supervisors.tree.restart_budget import ExitCause, RestartPolicy
from supervisors.tree.strategies import Strategy
from supervisors.tree.supervisor import SupervisionEvent, Supervisor
from tests.simulated import run_simulated
from transport.address import ActorAddress, PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport

LIMITS = Limits(orphan_grace_s=20.0, stop_timeout_s=8.0, restart_max=0)
NOWHERE = ActorAddress("nobody", PeerId("nowhere", 1))


class SlowToGo(Child):
    """It hears SIGTERM, and goes on until it is killed."""

    def __init__(self, pid: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(pid, loop)
        self.told_to_go = asyncio.Event()

    def send_signal(self, number: int) -> None:
        if number == signal.SIGTERM:
            self.told_to_go.set()

    def _signal_group(self, number: int) -> None:
        self._ended(-number)


class PretendMachine(LocalMachine):
    """Its processes are objects. ``ready``: they say that they are ready."""

    def __init__(self, *, ready: bool) -> None:
        super().__init__()
        self.system: ActorSystem
        self.launched: list[SlowToGo] = []
        self.most_at_once = 0
        self.ready = ready

    def launch(self, spec: Launch, listening: Listening | None = None) -> Child:
        child = SlowToGo(len(self.launched) + 1, asyncio.get_running_loop())
        self.launched.append(child)
        self.most_at_once = max(self.most_at_once, sum(child.running for child in self.launched))
        if self.ready:
            order = ProcessSpec.decode(spec.stdin)
            addresses = {order.args.name: ActorAddress(order.args.name, PeerId(order.peer, child.pid), "")}
            news = ProcessReady(name=order.name, pid=child.pid, incarnation=child.pid, addresses=addresses)
            self.system.ref(order.agent).tell(news)
        return child

    def is_stopped(self, pid: int) -> bool:
        return False


class HeadLife:
    """One life of the head, with a supervisor of one process."""

    def __init__(
        self, network: MemoryNetwork, life: int, agent: ActorRef, restart: RestartPolicy, run_dir: Path
    ) -> None:
        self.links = MemoryTransport(network, PeerId("head", life))
        self.system = ActorSystem(self.links, limits=LIMITS)
        self.events: list[SupervisionEvent] = []
        self._nodes = Nodes("head")
        self._nodes.add_local("n1", agent.address, slots=1)
        args = RoleArgs(
            role="trainer", name="trainer", node="", job="", model_path="", run_dir=str(run_dir), scheduler=NOWHERE,
            metrics=NOWHERE,
        )  # fmt: skip

        async def start(context: Context) -> Running:
            found = None if self.events else await adopt(context, self._nodes, "j.trainer", "trainer")
            return found or await start_process(context, agent.address, args, job="j")

        spec = ChildSpec("trainer", start, restart=restart)
        self.supervisor = Supervisor("services.j", Strategy.ONE_FOR_ONE, [spec], on_event=self.events.append)

    async def start(self) -> None:
        await self.system.start()
        await self.system.spawn("services.j", self.supervisor)

    @property
    def heard(self) -> list[tuple[str, ExitCause | None]]:
        return [(event.kind, event.cause) for event in self.events]


async def second_life(tmp_path: Path, restart: RestartPolicy, *, ready: bool) -> tuple[HeadLife, PretendMachine]:
    """A head comes back while its orphan is being stopped; that life once its own process is ready."""
    network, machine = MemoryNetwork(), PretendMachine(ready=ready)
    machine.system = ActorSystem(MemoryTransport(network, PeerId("machine", 1)), limits=LIMITS)
    await machine.system.start()
    options = NodeOptions(cluster="test", machine=machine)
    agent = await machine.system.spawn("agent", NodeAgent("n1", options))
    first = HeadLife(network, 21, agent, restart, tmp_path)
    await first.start()
    while not machine.launched:
        await asyncio.sleep(0.1)
    first.links.abort()
    await machine.launched[0].told_to_go.wait()

    machine.ready = True
    second = HeadLife(network, 22, agent, restart, tmp_path)
    await second.start()
    await asyncio.sleep(3 * LIMITS.stop_timeout_s)
    return second, machine


@pytest.mark.parametrize("restart", [RestartPolicy.PERMANENT, RestartPolicy.TRANSIENT])
def test_an_orphan_that_its_next_owner_adopts_while_it_is_stopped_is_replaced(
    tmp_path: Path, restart: RestartPolicy
) -> None:
    """Not by the new owner's order was it stopped; ``restart_max`` is 0, so its end must not be held against it."""

    async def scenario() -> None:
        second, machine = await second_life(tmp_path, restart, ready=True)
        assert second.heard == [
            ("adopted", None), ("exited", ExitCause.PREEMPTED), ("restarting", ExitCause.PREEMPTED), ("started", None)
        ]  # fmt: skip
        running = second.supervisor.running("trainer")
        assert running is not None and running.pid == 2
        assert machine.most_at_once == 1, "never two of one role"

    run_simulated(scenario())


def test_an_orphan_that_was_never_ready_makes_room_while_it_is_stopped(tmp_path: Path) -> None:
    """It cannot be adopted, and the start of its successor is not to fail because of it."""

    async def scenario() -> None:
        second, machine = await second_life(tmp_path, RestartPolicy.PERMANENT, ready=False)
        assert second.heard == [("started", None)]
        assert (len(machine.launched), machine.most_at_once) == (2, 1)

    run_simulated(scenario())
