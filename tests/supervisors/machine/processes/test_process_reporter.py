"""The reporter's news reaches the node agent, whatever the link does to it."""

from __future__ import annotations

import asyncio

from actors.core.actor import Actor, handles
from actors.core.system import ActorSystem
from actors.roles import RoleArgs
from configs.limits import DEFAULT_LIMITS
from supervisors.faults.process_faults import ProcessFaults
from supervisors.machine.processes.process_reporter import ProcessReporter
from supervisors.machine.processes.process_spec import ProcessSpec
from supervisors.tree.messages import ProcessBeacon, ProcessReady
from tests.simulated import run_simulated
from transport.address import PeerId
from transport.memory_transport import MemoryTransport
from transport.sim.network import Disturbance, SimNetwork

JOB = (
    '{"name": "j", "steps": 1, "model": {"path": "m"}, "data": {"source": "jsonl", "path": "d"},'
    ' "reward": {"kind": "exact_match"}}'
)


class Agent(Actor):
    def __init__(self) -> None:
        self.ready: list[ProcessReady] = []
        self.beacons = 0

    @handles(ProcessReady)
    async def process_ready(self, message: ProcessReady) -> None:
        self.ready.append(message)

    @handles(ProcessBeacon)
    async def beacon(self, message: ProcessBeacon) -> None:
        self.beacons += 1


async def readiness(loses_for_s: float) -> tuple[Agent, float]:
    """The first seconds of a reporter on a link that loses all that it says for so long."""
    network = SimNetwork()
    lossy = Disturbance("process".__eq__, "agent".__eq__, loss=1.0 if loses_for_s else 0.0)
    network.disturb(lossy)
    near = ActorSystem(MemoryTransport(network, PeerId("agent", 1)))
    far = ActorSystem(MemoryTransport(network, PeerId("process", 2)))
    await near.start()
    await far.start()
    agent = Agent()
    address = (await near.spawn("agent", agent)).address
    args = RoleArgs(
        role="rollout", name="rollout-0", node="n", job=JOB, model_path="m", run_dir="r",
        scheduler=near.address("scheduler.j"), metrics=near.address("metrics.j"),
    )  # fmt: skip
    spec = ProcessSpec(
        name="j.rollout-0", peer="process", args=args, agent=address, cluster="", listen="memory://process",
        limits=DEFAULT_LIMITS.model_dump_json(), seed=0,
    )  # fmt: skip
    await far.spawn("reporter", ProcessReporter(spec, {"rollout-0": far.address("rollout-0")}, ProcessFaults(), pid=7))
    loop = asyncio.get_running_loop()
    loop.call_later(loses_for_s, network.calm, lossy)
    while not agent.ready and loop.time() < 60:
        await asyncio.sleep(0.05)
    heard_s = loop.time()
    await asyncio.sleep(5)
    await far.stop()
    await near.stop()
    return agent, heard_s


def test_the_agent_hears_that_a_process_is_ready_though_the_link_broke_with_the_news() -> None:
    agent, heard_s = run_simulated(readiness(loses_for_s=1.0))
    assert [(news.name, news.pid) for news in agent.ready] == [("j.rollout-0", 7)]
    assert heard_s < 10, "as soon as the link is noticed to be broken, not after the time for starting"
    assert agent.beacons > 0


def test_it_is_said_once_where_the_link_holds() -> None:
    agent, heard_s = run_simulated(readiness(loses_for_s=0.0))
    assert (len(agent.ready), heard_s < 0.1) == (1, True)
