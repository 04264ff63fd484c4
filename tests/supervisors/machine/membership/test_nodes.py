"""The register of machines: what it knows of one that was cut off, and comes back."""

from __future__ import annotations

import asyncio

import pytest

from actors.core.actor import Actor
from actors.core.errors import RemoteError
from actors.core.message import Message
from actors.core.system import ActorSystem
from supervisors.machine.membership.nodes import JoinCluster, Joined, LeaveCluster, Node, Nodes
from supervisors.tree.errors import NoNode
from tests.broken_links import break_link
from tests.simulated import run_simulated
from transport.address import ActorAddress, PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport


class Agent(Actor):
    """There to be watched, and to speak for its machine."""

    async def speak(self, nodes: ActorAddress, question: Message) -> None:
        await self.ctx.ref(nodes).ask(question, Joined)


class Cluster:
    """A head with its register, and a machine of one slot."""

    def __init__(self) -> None:
        self.network, self.nodes = MemoryNetwork(), Nodes("head")
        self.head = ActorSystem(MemoryTransport(self.network, PeerId("head", 1)))
        self._lives = 0

    async def start(self) -> None:
        await self.head.start()
        await self.head.spawn("nodes", self.nodes)
        await self.start_machine()

    async def start_machine(self) -> None:
        """A new life of it."""
        self._lives += 1
        self.machine = ActorSystem(MemoryTransport(self.network, PeerId("n1", self._lives)))
        await self.machine.start()
        await self.machine.connect(self.head.endpoint)
        self.speaker = Agent()
        self.agent: ActorAddress = (await self.machine.spawn("agent", self.speaker)).address
        await self.join()

    async def join(self) -> Node:
        await self.speak(JoinCluster(node="n1", agent=self.agent, slots=1))
        return self.nodes.present[0]

    async def speak(self, question: Message) -> None:
        await self.speaker.speak(self.head.address("nodes"), question)

    async def cut(self) -> None:
        """Until the register has seen it."""
        seen = asyncio.Event()
        unsubscribe = self.nodes.subscribe(seen.set)
        break_link(self.network, "head", "n1")
        await seen.wait()
        unsubscribe()
        assert not self.nodes.present


def test_a_machine_that_was_cut_off_comes_back_as_full_as_it_was() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        await cluster.start()
        await cluster.nodes.choose("j.rollout-0", "remote", 1.0)
        await cluster.cut()
        assert (await cluster.join()).placed.keys() == {"j.rollout-0"}
        with pytest.raises(NoNode):
            await cluster.nodes.choose("j.rollout-1", "remote", 1.0)

    run_simulated(scenario())


def test_a_machine_that_was_to_go_is_still_to_go_when_it_comes_back() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        await cluster.start()
        cluster.nodes.drain("n1", left_s=30.0)
        leaves_s = cluster.nodes.present[0].leaves_s
        await cluster.cut()
        node = await cluster.join()
        assert (node.draining, node.leaves_s) == (True, leaves_s)
        with pytest.raises(NoNode):
            await cluster.nodes.choose("j.rollout-0", "remote", 1.0)

    run_simulated(scenario())


def test_a_machine_that_is_drained_while_it_is_cut_off_is_to_go_when_it_comes_back() -> None:
    """Who orders it sees only that the machine is not there; it may be back the next moment, with all that it runs."""

    async def scenario() -> None:
        cluster = Cluster()
        await cluster.start()
        await cluster.cut()
        assert cluster.nodes.drain("n1")
        assert not cluster.nodes.drain("n2")
        assert (await cluster.join()).draining

    run_simulated(scenario())


def test_what_was_released_while_its_machine_was_cut_off_is_not_placed_there_again() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        await cluster.start()
        await cluster.nodes.choose("j.rollout-0", "remote", 1.0)
        await cluster.cut()
        cluster.nodes.release("j.rollout-0")
        assert (await cluster.join()).placed == {}

    run_simulated(scenario())


def test_a_new_life_of_a_machine_is_empty_and_open() -> None:
    """Its processes ended with the one before, and who drained that did not mean this one."""

    async def scenario() -> None:
        cluster = Cluster()
        await cluster.start()
        await cluster.nodes.choose("j.rollout-0", "remote", 1.0)
        cluster.nodes.drain("n1")
        await cluster.cut()
        await cluster.start_machine()
        (node,) = cluster.nodes.present
        assert (node.agent.peer.incarnation, node.placed, node.draining) == (2, {}, False)

    run_simulated(scenario())


def test_a_machine_joins_and_leaves_in_its_own_name_only() -> None:
    """With a second machine's name it could have that one drained, or have its processes started elsewhere."""

    async def scenario() -> None:
        cluster = Cluster()
        await cluster.start()
        elsewhere = ActorAddress("agent", PeerId("n2", 7))
        for question in (
            JoinCluster(node="n2", agent=cluster.agent, slots=1),
            JoinCluster(node="n1", agent=elsewhere, slots=1),
            LeaveCluster(node="n2"),
        ):
            with pytest.raises(RemoteError, match="under its own name"):
                await cluster.speak(question)
        (node,) = cluster.nodes.present
        assert (node.name, node.agent, node.draining) == ("n1", cluster.agent, False)

    run_simulated(scenario())


def test_a_machine_of_one_jobs_provider_takes_no_other_jobs_processes() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        await cluster.start()
        cluster.nodes.reserve("n", "j")
        assert (cluster.nodes.usable_by("k"), [node.name for node in cluster.nodes.usable_by("j")]) == ([], ["n1"])
        for refused in (cluster.nodes.choose("k.rollout-0", "remote", 1.0), cluster.nodes.wait_for_remote(1, 1.0, "k")):
            with pytest.raises(NoNode):
                await refused
        await cluster.nodes.wait_for_remote(1, 1.0, "j")
        assert (await cluster.nodes.choose("j.rollout-0", "remote", 1.0)).name == "n1"

    run_simulated(scenario())
