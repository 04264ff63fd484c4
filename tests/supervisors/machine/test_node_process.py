"""A machine that offers itself: what it may be called, who is refused, and how it ends."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from actors.core.actor import Actor
from actors.core.errors import RemoteError
from actors.core.message import Message
from actors.core.ref import ActorRef
from actors.core.system import ActorSystem
from configs.limits import Limits
from supervisors.machine.membership.node import Membership, NodeProcess, check_node
from supervisors.machine.membership.nodes import JoinCluster, Joined, LeaveCluster, Nodes
from supervisors.tree.errors import HeadLost
from tests.simulated import run_simulated
from transport.address import ActorAddress, PeerId
from transport.errors import HandshakeRefused
from transport.memory_transport import MemoryNetwork, MemoryTransport
from transport.zmq.transport import ZmqTransport

LIMITS = Limits(rejoin_patience_s=1.0, connect_timeout_s=2.0, backoff_first_s=0.02, backoff_max_s=0.1)
BAD_NAMES = ["head", "machine", "", "..", "a/b", "a\nb", "a\x1b[2J", "x" * 57]


class Agent(Actor):
    """There to be watched, and to speak for its machine."""

    async def speak(self, nodes: ActorAddress, question: Message) -> None:
        await self.ctx.ref(nodes).ask(question, Joined)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_machine_with_a_name_that_is_none_does_not_begin(name: str) -> None:
    with pytest.raises(ValueError, match="--name"):
        check_node(name, "reserved", "", 0.0)
    with pytest.raises(ValueError, match="--name"):
        NodeProcess(join="tcp://127.0.0.1:1", name=name, slots=1, keys=None)


@pytest.mark.parametrize("notice_s", [math.inf, -math.inf, math.nan, -1.0])
def test_a_notice_that_is_no_time_is_refused(notice_s: float) -> None:
    with pytest.raises(ValueError, match=r"--notice is .*, expected seconds from 0"):
        check_node("n", "reserved", "", notice_s)


def test_kind_and_site_are_names_too() -> None:
    check_node(None, "spot.a100", "", 120.0)
    with pytest.raises(ValueError, match="--kind"):
        check_node("n", "a b", "", 0.0)
    with pytest.raises(ValueError, match="--site"):
        check_node("n", "reserved", "../elsewhere", 0.0)


def test_the_name_that_a_machine_gives_itself_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("", "a host!", "…", "-x-", "h" * 200):
        monkeypatch.setattr("platform.node", lambda host=host: host)
        NodeProcess(join="tcp://127.0.0.1:1", name=None, slots=1, keys=None)


@pytest.mark.parametrize(
    "changes",
    [*({"node": name} for name in BAD_NAMES), {"kind": "a/b"}, {"kind": ""}, {"slots": 0}, {"slots": -3},
     {"slots": 10**9}],
)  # fmt: skip
def test_an_offer_that_is_none_is_refused_by_the_register_whoever_sent_it(changes: dict[str, object]) -> None:
    async def scenario() -> None:
        network, nodes = MemoryNetwork(), Nodes("head")
        head, machine = (ActorSystem(MemoryTransport(network, PeerId(name, 1))) for name in ("head", "n1"))
        await head.start()
        await machine.start()
        await machine.connect(head.endpoint)
        register = (await head.spawn("nodes", nodes)).address
        speaker = Agent()
        agent = (await machine.spawn("agent", speaker)).address
        good = {"node": "n1", "agent": agent, "slots": 1, "kind": "reserved"}
        with pytest.raises(RemoteError, match="NodeRefused") as refused:
            await speaker.speak(register, JoinCluster(**good | changes))
        assert refused.value.declared and refused.value.permanent
        assert not nodes.present
        await speaker.speak(register, JoinCluster(**good))
        for left_s in (math.nan, math.inf, -1.0):
            with pytest.raises(RemoteError, match="left_s"):
                await speaker.speak(register, LeaveCluster(node="n1", left_s=left_s))
        assert not nodes.present[0].draining
        await machine.stop()
        await head.stop()

    run_simulated(scenario())


class HeadAt:
    """A head with a register, reached over ZeroMQ."""

    def __init__(self) -> None:
        self.nodes = Nodes("head")
        transport = ZmqTransport(PeerId("head", 1), listen="ipc://*", cluster="headrace", limits=LIMITS)
        self.system = ActorSystem(transport, limits=LIMITS)

    async def start(self) -> None:
        await self.system.start()
        await self.system.spawn("nodes", self.nodes)

    def node(self, name: str = "n1") -> NodeProcess:
        return NodeProcess(join=self.system.endpoint, name=name, slots=1, keys=None, limits=LIMITS)

    async def has(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.nodes.present) != count:
                await asyncio.sleep(0.01)


@pytest.fixture
async def head() -> AsyncIterator[HeadAt]:
    head = HeadAt()
    await head.start()
    yield head
    await head.system.stop()


async def test_a_second_machine_of_a_name_is_refused_and_the_first_one_stays(head: HeadAt) -> None:
    first, second = head.node(), head.node()
    await first.start()
    before = head.nodes.present[0].agent
    with pytest.raises(HandshakeRefused, match="a node named n1 is here and answers; give this one another --name"):
        await second.start()
    await second.stop()
    assert [node.agent for node in head.nodes.present] == [before]
    await first.stop()


async def test_the_same_machine_coming_back_has_its_name(head: HeadAt) -> None:
    first, second = head.node(), head.node()
    await first.start()
    assert first.system is not None
    starting = asyncio.create_task(second.start())
    await asyncio.sleep(0.3)
    await first.system.stop()  # its former life is missed a moment after the next one has asked
    await asyncio.wait_for(starting, 20)
    assert [node.agent.peer.incarnation for node in head.nodes.present] == [second.system.peer.incarnation]
    await second.stop()


async def test_the_sockets_of_a_machine_that_was_killed_go_with_the_next_start_or_end(
    head: HeadAt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = b'{"pid": 4194304, "began_s": 0}'  # beyond the largest process id

    async def began(name: str) -> tuple[NodeProcess, Path]:
        before, node = set(tmp_path.iterdir()), head.node(name)
        await node.start()
        [made] = set(tmp_path.iterdir()) - before
        return node, made

    first, its_sockets = await began("n1")
    second, others_sockets = await began("n2")
    (its_sockets / "owner.json").write_bytes(killed)
    third, thirds_sockets = await began("n3")
    assert not its_sockets.exists() and others_sockets.exists()
    (others_sockets / "owner.json").write_bytes(killed)
    await third.stop()
    assert not others_sockets.exists() and not thirds_sockets.exists()
    await second.stop()
    await first.stop()


async def test_a_machine_whose_head_ends_in_good_order_ends_so_itself(head: HeadAt) -> None:
    node = head.node()
    await node.start()
    waiting = asyncio.create_task(node.wait(asyncio.Event()))
    await asyncio.sleep(0)
    await head.system.stop()
    assert await asyncio.wait_for(waiting, 20) is False
    await node.stop()


async def test_a_machine_whose_head_ends_while_it_joins_ends_in_good_order_too(
    head: HeadAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    introduce = Membership.introduce

    async def then_the_register_ends(membership: Membership, scheduler: ActorRef) -> None:
        await introduce(membership, scheduler)
        await head.system.stop_actor("nodes")  # before the machine watches it

    monkeypatch.setattr(Membership, "introduce", then_the_register_ends)
    node = head.node()
    await node.start()
    waiting = asyncio.create_task(node.wait(asyncio.Event()))
    async with asyncio.timeout(5):
        while node._membership is None or node._membership.known_to is not None:  # its watch was answered
            await asyncio.sleep(0.01)
    await head.system.stop()
    assert await asyncio.wait_for(waiting, 20) is False
    await node.stop()


async def test_a_machine_whose_head_is_torn_away_says_that_it_is_lost(head: HeadAt) -> None:
    node = head.node()
    await node.start()
    waiting = asyncio.create_task(node.wait(asyncio.Event()))
    await asyncio.sleep(0)
    head.system._transport.abort()
    with pytest.raises(HeadLost):
        await asyncio.wait_for(waiting, 20)
    await node.stop()


async def test_a_machine_that_is_told_to_go_was_not_left(head: HeadAt) -> None:
    node, stopped = head.node(), asyncio.Event()
    await node.start()
    waiting = asyncio.create_task(node.wait(stopped))
    stopped.set()
    assert await asyncio.wait_for(waiting, 5) is True
    await node.stop()
