"""A node that is cut off: its processes are replaced elsewhere, once the grace is over, for one unit of budget."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Self

from actors.core.actor import Actor, handles
from actors.core.context import Context
from actors.core.system import ActorSystem
from actors.roles import RoleArgs
from configs.limits import Limits
from supervisors.tree.children import ChildSpec, Running, start_process
from supervisors.tree.messages import (
    ListProcesses,
    ProcessExited,
    ProcessInfo,
    ProcessList,
    ProcessStarted,
    SpawnProcess,
    SpawnReply,
    StopProcess,
    StopReply,
)
from supervisors.tree.restart_budget import ExitCause
from supervisors.tree.strategies import Strategy
from supervisors.tree.supervisor import SupervisionEvent, Supervisor
from tests.broken_links import break_link
from transport.address import ActorAddress, PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport

LIMITS = Limits(backoff_first_s=0.001, restart_max=1, unreachable_grace_s=0.3, spawn_overhead_s=0.5)
NOWHERE = ActorAddress("nobody", PeerId("nowhere", 1))


class PretendAgent(Actor):
    """A node agent without processes: it says that they run."""

    def __init__(self, node: str, *, exits_early: bool = False) -> None:
        self.node, self.exits_early = node, exits_early
        self.processes: dict[str, int] = {}
        self._pids = 0

    @handles(SpawnProcess)
    async def spawn(self, message: SpawnProcess) -> SpawnReply:
        self._pids += 1
        pid = self.processes[message.name] = self._pids
        if self.exits_early and pid == 1:
            owner = self.ctx.sender
            assert owner is not None
            news = ProcessExited(name=message.name, node=self.node, pid=pid, incarnation=pid,
                                 cause=ExitCause.KILLED, exit_code=-9, detail="early")  # fmt: skip
            self.ctx.ref(owner).tell(news)
        address = ActorAddress(message.args.name, PeerId(f"{self.node}.{message.name}", pid), "")
        started = ProcessStarted(name=message.name, node=self.node, pid=pid, incarnation=pid,
                                 addresses={message.args.name: address}, seconds=0.0)  # fmt: skip
        return SpawnReply(started=started)

    @handles(StopProcess)
    async def stop(self, message: StopProcess) -> StopReply:
        self.processes.pop(message.name, None)
        return StopReply(exit_code=0)

    @handles(ListProcesses)
    async def list_all(self, message: ListProcesses) -> ProcessList:
        infos = [ProcessInfo(name=n, role="r", pid=p, incarnation=p, health="alive") for n, p in self.processes.items()]
        return ProcessList(node=self.node, processes=infos)


class Cluster:
    """A head with a supervisor and two nodes with pretended agents, in one process."""

    def __init__(self, *, exits_early: bool = False, limits: Limits | None = None) -> None:
        self.network, self.limits = MemoryNetwork(), limits
        self.agents = {name: PretendAgent(name, exits_early=exits_early) for name in ("n1", "n2")}
        self.systems: dict[str, ActorSystem] = {}
        self.addresses: dict[str, ActorAddress] = {}
        self.chosen = "n1"
        self.events: list[SupervisionEvent] = []
        self._arrival = asyncio.Event()

    async def __aenter__(self) -> Self:
        for number, name in enumerate(["head", *self.agents]):
            transport = MemoryTransport(self.network, PeerId(name, number + 1))
            self.systems[name] = ActorSystem(transport, limits=LIMITS, seed=1)
            await self.systems[name].start()
        for name, agent in self.agents.items():
            self.addresses[name] = (await self.systems[name].spawn("agent", agent)).address
        specs = [ChildSpec(name, self._starter(name)) for name in ("w0", "w1", "w2")]
        self.supervisor = Supervisor("fleet", Strategy.ONE_FOR_ONE, specs, on_event=self._on_event)
        await self.systems["head"].spawn("fleet", self.supervisor)
        await self.supervisor.ready(5)
        return self

    async def __aexit__(self, *_: object) -> None:
        for system in self.systems.values():
            await system.stop()

    def _args(self, name: str) -> RoleArgs:
        return RoleArgs(
            role="r", name=name, node="", job="", model_path="", run_dir="", scheduler=NOWHERE, metrics=NOWHERE
        )

    def _starter(self, name: str) -> Callable[[Context], Awaitable[Running]]:
        async def start(context: Context) -> Running:
            agent = self.addresses[self.chosen]
            return await start_process(context, agent, self._args(name), job="j", limits=self.limits)

        return start

    def _on_event(self, event: SupervisionEvent) -> None:
        self.events.append(event)
        self._arrival.set()

    async def until(self, kind: str, count: int) -> list[SupervisionEvent]:
        async with asyncio.timeout(5):
            while len(found := [e for e in self.events if e.kind == kind]) < count:
                self._arrival.clear()
                await self._arrival.wait()
        return found

    def nodes(self) -> set[str]:
        return {info.node for info in self.supervisor.snapshot()}


async def test_a_lost_node_costs_one_unit_and_its_children_start_elsewhere():
    """restart_max is 1: were each of the three children counted, the supervisor would give up."""
    async with Cluster() as cluster:
        assert cluster.nodes() == {"n1"}
        cluster.chosen = "n2"
        await cluster.systems["n1"].stop()
        exits = await cluster.until("exited", 3)
        assert {e.cause for e in exits} <= {ExitCause.UNREACHABLE, ExitCause.PREEMPTED}
        await cluster.until("started", 6)
        assert cluster.nodes() == {"n2"}


async def test_a_cut_that_lasts_is_unreachable_and_a_short_one_is_forgiven():
    async with Cluster() as cluster:
        break_link(cluster.network, "head", "n1")
        await asyncio.sleep(2 * LIMITS.unreachable_grace_s)  # real time: the grace must have passed
        assert [e.kind for e in cluster.events] == ["started"] * 3
        cluster.chosen = "n2"
        cluster.agents["n1"].processes.clear()  # after the next cut it no longer has them
        break_link(cluster.network, "head", "n1")
        exits = await cluster.until("exited", 3)
        assert {e.cause for e in exits} == {ExitCause.UNREACHABLE}
        await cluster.until("started", 6)
        assert cluster.nodes() == {"n2"}


async def test_an_exit_that_overtakes_the_answer_to_its_start_is_not_lost():
    async with Cluster(exits_early=True) as cluster:
        exits = await cluster.until("exited", 1)
        assert (exits[0].cause, exits[0].detail) == (ExitCause.KILLED, "early")
        await cluster.until("started", 4)


async def test_a_process_is_told_its_jobs_limits_on_whichever_machine_it_starts():
    """Its node agent's own are of the machine that the node was started on, and know nothing of the job file."""
    orders: list[SpawnProcess] = []

    class Recording(PretendAgent):
        @handles(SpawnProcess)
        async def spawn(self, message: SpawnProcess) -> SpawnReply:
            orders.append(message)
            return await super().spawn(message)

    cluster = Cluster(limits=Limits(hand_over_s=0.7, beacon_budget_s=77.0))
    cluster.agents["n1"] = Recording("n1")
    async with cluster:
        assert [Limits.model_validate_json(order.limits).hand_over_s for order in orders] == [0.7] * 3
        assert [order.beacon_budget_s for order in orders] == [77.0] * 3, "by which its node agent judges it"
