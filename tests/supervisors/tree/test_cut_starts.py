"""A start that is given up for its group, over a network on which its answer may be on its way just then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Self

import pytest

from actors.core.actor import Actor, concurrent, handles
from actors.core.context import Context
from actors.core.system import ActorSystem
from actors.roles import RoleArgs
from configs.limits import Limits
from supervisors.tree.child_record import Stage
from supervisors.tree.children import ChildSpec, Running, start_process
from supervisors.tree.messages import (
    ProcessExited,
    ProcessStarted,
    SpawnProcess,
    SpawnReply,
    StopProcess,
    StopReply,
)
from supervisors.tree.restart_budget import ExitCause, RestartPolicy
from supervisors.tree.strategies import Strategy
from supervisors.tree.supervisor import SupervisionEvent, Supervisor
from tests.simulated import run_simulated
from transport.address import ActorAddress, PeerId
from transport.memory_transport import MemoryTransport
from transport.sim.network import SimNetwork, Weather

LIMITS = Limits(backoff_first_s=0.5)
NOWHERE = ActorAddress("nobody", PeerId("nowhere", 1))
WAY_S = 0.01
"""Time of a message between the supervisor and the agent."""
READY_S = {"f": 1.0, "l": 2.0}
"""When the processes of the group are ready."""


class Agent(Actor):
    """A node agent as a supervisor knows it: a process that is asked for is there, until somebody ends it."""

    def __init__(self) -> None:
        self.processes: dict[str, int] = {}
        self.started = 0

    @handles(SpawnProcess)
    @concurrent
    async def spawn(self, message: SpawnProcess) -> SpawnReply:
        name, owner = message.args.name, self.ctx.sender
        assert owner is not None
        self.started += 1
        pid = self.processes[name] = self.started
        try:
            await self.ctx.sleep(READY_S[name])
        except asyncio.CancelledError:
            self._end(name, pid)
            raise
        assert self.processes.get(name) == pid
        address = ActorAddress(name, PeerId(f"n.{name}", pid), "")
        return SpawnReply(started=ProcessStarted(
            name=message.name, node="n", pid=pid, incarnation=pid, addresses={name: address}, seconds=0.0
        ))  # fmt: skip

    def _end(self, name: str, pid: int) -> None:
        if self.processes.get(name) == pid:
            del self.processes[name]

    @handles(StopProcess)
    async def stop(self, message: StopProcess) -> StopReply:
        self.processes.pop(message.name.removeprefix("j."), None)
        return StopReply(exit_code=0)

    def kill(self, name: str, owner: ActorAddress) -> None:
        pid = self.processes.pop(name)
        cause, code = ExitCause.KILLED, -9
        self.ctx.ref(owner).tell(
            ProcessExited(name=f"j.{name}", node="n", pid=pid, incarnation=pid, cause=cause, exit_code=code, detail="")
        )


class TwoMachines:
    """A supervisor of a group, ``f`` and its leader ``l``, and the agent that starts both."""

    def __init__(self, restart: RestartPolicy) -> None:
        self._restart = restart
        self.agent = Agent()
        self.events: list[SupervisionEvent] = []

    async def __aenter__(self) -> Self:
        network = SimNetwork(1, Weather(latency_s=WAY_S, jitter_s=0.0), LIMITS)
        self.systems = [
            ActorSystem(MemoryTransport(network, PeerId(name, 1), listen=f"memory://{name}", limits=LIMITS))
            for name in ("head", "n")
        ]
        for system in self.systems:
            await system.start()
        self._address = (await self.systems[1].spawn("agent", self.agent)).address
        specs = [ChildSpec(name, self._starter(name), restart=self._restart, group="l") for name in "fl"]
        self.supervisor = Supervisor("s", Strategy.ONE_FOR_ONE, specs, on_event=self.events.append, limits=LIMITS)
        self.owner = (await self.systems[0].spawn("s", self.supervisor)).address
        return self

    async def __aexit__(self, *_: object) -> None:
        for system in self.systems:
            await system.stop()

    def _starter(self, name: str) -> Callable[[Context], Coroutine[Any, Any, Running]]:
        args = RoleArgs(
            role="r", name=name, node="", job="{}", model_path="", run_dir="", scheduler=NOWHERE, metrics=NOWHERE
        )

        async def start(context: Context) -> Running:
            return await start_process(context, self._address, args, job="j", limits=LIMITS)

        return start


MOMENTS = [round(WAY_S * quarter / 4, 6) for quarter in range(-6, 7)]
"""Around the one at which the leader is ready, over more than a round trip."""


@pytest.mark.parametrize("moment_s", MOMENTS)
@pytest.mark.parametrize("restart", [RestartPolicy.TEMPORARY, RestartPolicy.PERMANENT])
def test_the_end_of_a_member_leaves_nothing_of_a_start_that_it_cuts(moment_s: float, restart: RestartPolicy) -> None:
    async def main() -> None:
        async with TwoMachines(restart) as both:
            began_s = asyncio.get_running_loop().time()
            async with asyncio.timeout(5):
                while "l" not in both.agent.processes:
                    await asyncio.sleep(WAY_S / 16)
            ready_s = asyncio.get_running_loop().time() + READY_S["l"]
            await asyncio.sleep(ready_s + moment_s - WAY_S - asyncio.get_running_loop().time())
            both.agent.kill("f", both.owner)
            await asyncio.sleep(10.0 - (asyncio.get_running_loop().time() - began_s))
            known = {name: both.supervisor.running(name) for name in "fl"}
            assert both.agent.processes == {name: one.pid for name, one in known.items() if one is not None}
            assert len(both.agent.processes) == (0 if restart is RestartPolicy.TEMPORARY else 2)

    run_simulated(main())


@pytest.mark.parametrize("moment_s", MOMENTS)
def test_a_group_that_is_removed_as_it_becomes_ready_is_gone_once_that_is_done(moment_s: float) -> None:
    async def main() -> None:
        async with TwoMachines(RestartPolicy.PERMANENT) as both:
            async with asyncio.timeout(5):
                while "l" not in both.agent.processes:
                    await asyncio.sleep(WAY_S / 16)
            await asyncio.sleep(READY_S["l"] + moment_s)
            await both.supervisor.remove_child("l")
            assert both.agent.processes == {}

    run_simulated(main())


def test_two_who_stop_a_child_that_a_start_given_up_has_left_stop_it_once() -> None:
    """A recovery and the end of all may reach the same one before either has had a turn."""

    async def main() -> None:
        async with TwoMachines(RestartPolicy.TEMPORARY) as both:
            await both.supervisor.ready(10.0)
            child = both.supervisor._children["f"]
            child.stage = Stage.LEFT
            assert await asyncio.gather(both.supervisor._stop(child), both.supervisor._stop(child)) == [True, False]
            assert child.stage is Stage.DOWN
            assert "f" not in both.agent.processes

    run_simulated(main())
