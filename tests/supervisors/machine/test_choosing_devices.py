"""The register chooses node and devices together: for roles that share, and for ranks that do not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.core.system import ActorSystem
from configs.limits import Limits
from supervisors.machine.membership.nodes import JoinCluster, Nodes, check_offer
from supervisors.pool.node_workers import worker_names
from supervisors.tree.errors import NodeRefused, NoNode
from tests.simulated import run_simulated
from transport.address import ActorAddress, PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport

AGENT = ActorAddress("agent", PeerId("head", 1))
PAIR = ("j.w", "j.w.1")


def registered(scenario: Callable[[Nodes], Awaitable[None]], *devices: str) -> None:
    """Run ``scenario`` on a head's machine with these devices."""

    async def run() -> None:
        system, nodes = ActorSystem(MemoryTransport(MemoryNetwork(), PeerId("head", 1))), Nodes("head")
        await system.start()
        await system.spawn("nodes", nodes)
        nodes.add_local("head", AGENT, 4, devices)
        await scenario(nodes)
        await system.stop()

    run_simulated(run())


def add(nodes: Nodes, name: str, *devices: str, slots: int = 1) -> None:
    """A node that has joined."""
    nodes.add_local(name, AGENT, slots, devices)
    next(node for node in nodes.present if node.name == name).local = False


def test_on_one_device_all_roles_share_it() -> None:
    async def scenario(nodes: Nodes) -> None:
        for process in ("j.trainer", "j.rollout-0", "j.rollout-1"):
            await nodes.choose(process, "local", 1.0, devices=1)
            assert nodes.devices_of(process) == ("0",)
        await nodes.choose("j.weights", "local", 1.0)
        assert nodes.devices_of("j.weights") == (), "it sees none"

    registered(scenario, "0")


def test_on_a_machine_without_devices_nothing_is_said_of_them() -> None:
    async def scenario(nodes: Nodes) -> None:
        for process in PAIR:
            await nodes.choose(process, "local", 1.0, devices=1, group=PAIR)
            assert nodes.devices_of(process) is None

    registered(scenario)


def test_a_new_start_takes_the_least_used_and_a_process_that_is_gone_has_none() -> None:
    async def scenario(nodes: Nodes) -> None:
        for process in ("j.trainer", "j.rollout-0", "j.rollout-1"):
            await nodes.choose(process, "local", 1.0, devices=1)
        assert [nodes.devices_of(f"j.{name}") for name in ("trainer", "rollout-0", "rollout-1")] == [
            ("0",), ("1",), ("0",)
        ]  # fmt: skip
        nodes.release("j.rollout-0")
        assert nodes.devices_of("j.rollout-0") is None
        await nodes.choose("j.rollout-1", "local", 1.0, devices=1)
        assert nodes.devices_of("j.rollout-1") == ("1",)

    registered(scenario, "0", "1")


def test_a_group_takes_one_slot_of_the_node_where_its_first_is() -> None:
    async def scenario(nodes: Nodes) -> None:
        add(nodes, "n1", "0", "1", slots=2)
        add(nodes, "n2", "0", "1", slots=2)
        chosen = [(await nodes.choose(p, "remote", 1.0, devices=1, group=PAIR)).name for p in PAIR]
        assert chosen == ["n1", "n1"]
        assert [nodes.devices_of(p) for p in PAIR] == [("0",), ("1",)]
        assert {node.name: node.slots_used for node in nodes.present} == {"head": 0, "n1": 1, "n2": 0}
        other = ("j.v", "j.v.1")
        assert [(await nodes.choose(p, "remote", 1.0, devices=1, group=other)).name for p in other] == ["n2", "n2"]

    registered(scenario)


def test_a_group_that_starts_anew_leaves_a_node_that_drains_together() -> None:
    async def scenario(nodes: Nodes) -> None:
        for name in ("n1", "n2"):
            add(nodes, name, "0", "1")
        for process in PAIR:
            await nodes.choose(process, "remote", 1.0, devices=1, group=PAIR)
        nodes.drain("n1")
        assert [(await nodes.choose(p, "remote", 1.0, devices=1, group=PAIR)).name for p in PAIR] == ["n2", "n2"]

    registered(scenario)


def test_a_node_with_too_few_devices_is_not_chosen_and_the_reason_is_said() -> None:
    async def scenario(nodes: Nodes) -> None:
        add(nodes, "n1", "0")
        with pytest.raises(
            NoNode, match=r"j\.w and the other ranks of its group want 2 devices of one node, but n1 has 1"
        ):
            await nodes.choose("j.w", "remote", 1.0, devices=1, group=PAIR)
        with pytest.raises(NoNode, match="want 2 devices of one node, but n1 has 1"):
            await nodes.choose("j.w", "node:n1", 1.0, devices=1, group=PAIR)
        add(nodes, "n2", "0", "1")
        assert (await nodes.choose("j.w", "remote", 1.0, devices=1, group=PAIR)).name == "n2"

    registered(scenario)


def test_what_runs_but_is_not_adopted_yet_keeps_its_device() -> None:
    async def scenario(nodes: Nodes) -> None:
        nodes.heard("head", {"j.rollout-0": ("0",), "other.trainer": ("1",)})
        await nodes.choose("j.trainer", "local", 1.0, devices=1)
        assert nodes.devices_of("j.trainer") == ("2",)
        nodes.place("j.rollout-0", "head", ("0",))
        nodes.heard("head", {"j.rollout-0": (), "j.trainer": ()})
        free = nodes.present[0].devices.free
        assert free == ("1",), "whoever is gone has none, and of those that are placed here the register knows"

    registered(scenario, "0", "1", "2")


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(2, 4),
    acts=st.lists(st.tuples(st.sampled_from(["start", "end"]), st.sampled_from(["j.t", "j.w", "j.v"])), max_size=12),
)
def test_groups_come_and_go_and_no_two_ranks_of_one_ever_share(count: int, acts: list[tuple[str, str]]) -> None:
    async def scenario(nodes: Nodes) -> None:
        for act, leader in acts:
            group = (leader, f"{leader}.1")
            for process in group:
                if act == "start":
                    await nodes.choose(process, "local", 1.0, devices=1, group=group)
                else:
                    nodes.release(process)
            held = [nodes.devices_of(process) for process in group]
            if act == "start":
                assert held[0] and held[1] and held[0] != held[1]
            uses = [len(users) for users in nodes.present[0].devices.users.values()]
            assert sum(uses) == len(nodes.present[0].placed)

    registered(scenario, *map(str, range(count)))


@pytest.mark.parametrize(
    ("devices", "sentence"),
    [
        (("0", "cuda:1"), "the node's device 'cuda:1' is none, expected a number or an id such as GPU-…"),
        (("0\n1",), "is none, expected"),
        (tuple(map(str, range(129))), "the node has 129 devices, expected at most 128"),
    ],
)
def test_devices_that_are_none_are_refused_whoever_offers_them(devices: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(NodeRefused, match=sentence):
        check_offer(JoinCluster(node="n1", agent=AGENT, slots=1, devices=devices), Limits())


def test_a_node_takes_no_more_workers_of_several_ranks_than_have_devices_apart() -> None:
    """Its slots are as many as its devices, unless it says otherwise."""

    async def scenario(nodes: Nodes) -> None:
        add(nodes, "n1", "0", "1", "2", "3", slots=4)
        (node,) = (node for node in nodes.present if not node.local)
        assert [node.room(ranks) for ranks in (1, 2, 3, 8)] == [4, 2, 1, 0]
        assert worker_names(node, 2) == ["rollout-n1", "rollout-n1.1"]
        for worker in ("a", "b"):
            for process in (worker, f"{worker}.1"):
                await nodes.choose(process, "remote", 1.0, devices=1, group=(worker, f"{worker}.1"))
        assert node.devices.free == ()
        with pytest.raises(NoNode):
            await nodes.choose("c", "remote", 0.1, devices=1, group=("c", "c.1"))

    registered(scenario)
