"""Nodes that are kept for a trainer's replicas: chosen by their room, given up by workers, changed when they go."""

from __future__ import annotations

import asyncio

import pytest

from configs.names import rank_name
from supervisors.machine.membership.joined_node import Node
from supervisors.machine.membership.nodes import Nodes
from supervisors.pool.node_workers import worker_names
from supervisors.tree.errors import NoNode
from tests.supervisors.machine.test_choosing_devices import add, registered

TRAINER = "j.trainer"


def replicas(count: int, ranks: int) -> list[list[str]]:
    """All replicas of a trainer, the first on the head's machine."""
    names = [rank_name(TRAINER, rank) for rank in range(count * ranks)]
    return [names[first : first + ranks] for first in range(0, count * ranks, ranks)]


def expect(nodes: Nodes, count: int = 2, ranks: int = 1, devices: int = 0) -> list[list[str]]:
    of_trainer = replicas(count, ranks)
    nodes.expect(TRAINER, of_trainer[1:], devices)
    return of_trainer


async def start(nodes: Nodes, of_trainer: list[list[str]], devices: int = 0, within_s: float = 1.0) -> dict[str, str]:
    """Start all ranks at once, as a supervisor does; the node of each."""

    async def choose(process: str, replica: list[str]) -> tuple[str, str]:
        kind = "local" if TRAINER in replica else "replica"
        return process, (await nodes.choose(process, kind, within_s, devices=devices, group=replica)).name

    async with asyncio.TaskGroup() as starts:
        chosen = [starts.create_task(choose(process, replica)) for replica in of_trainer for process in replica]
    return dict(task.result() for task in chosen)


def node_of(nodes: Nodes, name: str) -> Node:
    return next(node for node in nodes.present if node.name == name)


def lose(nodes: Nodes, name: str) -> None:
    """It is cut off, as far as the register can see."""
    nodes._keep_aside(nodes._nodes.pop(name))
    nodes._signal()


def test_each_replica_goes_to_the_node_with_most_room_a_slot_and_a_device_for_each_of_its_ranks() -> None:
    async def scenario(nodes: Nodes) -> None:
        add(nodes, "n1", "0", "1", slots=2)
        add(nodes, "n2", "0", "1", "2", slots=3)
        of_trainer = expect(nodes, 3, 2, devices=1)
        assert await start(nodes, of_trainer, 1) == {
            "j.trainer": "head", "j.trainer.rank1": "head", "j.trainer.rank2": "n2", "j.trainer.rank3": "n2",
            "j.trainer.rank4": "n1", "j.trainer.rank5": "n1",
        }  # fmt: skip
        assert {node.name: node.slots_used for node in nodes.present} == {"head": 1, "n1": 2, "n2": 2}
        devices = {nodes.devices_of(process) for process in of_trainer[1]}
        assert len(devices) == 2 and () not in devices
        assert nodes.replicas.nodes_of(TRAINER) == ["n2", "n1"] and not nodes.replicas.wanted(TRAINER)

    registered(scenario, "0", "1")


def test_two_replicas_may_share_a_node_that_has_slots_and_devices_for_both() -> None:
    async def scenario(nodes: Nodes) -> None:
        add(nodes, "n1", "0", "1", slots=4)
        of_trainer = expect(nodes, 3, 1, devices=1)
        await start(nodes, of_trainer, 1)
        assert {nodes.devices_of(process) for (process,) in of_trainer[1:]} == {("0",), ("1",)}
        nodes.expect("k.trainer", [["k.trainer.rank1"]], 1)
        assert nodes.replicas.nodes_of("k.trainer") == ["n1"], "of another trainer: devices may be shared"
        expect(nodes, 4, 1, devices=1)
        assert nodes.replicas.nodes_of(TRAINER) == ["n1", "n1", ""], "there is no third device"

    registered(scenario, "0")


def test_no_worker_is_given_a_slot_that_is_kept_whether_its_rank_is_there_yet_or_not() -> None:
    async def scenario(nodes: Nodes) -> None:
        add(nodes, "n1", slots=2)
        of_trainer = expect(nodes)
        node = node_of(nodes, "n1")
        for _ in ("before", "after"):
            assert worker_names(node, 1) == ["rollout-n1"] and node.slots_used == 1
            assert (await nodes.choose("j.rollout-0", "remote", 0.1)).name == "n1"
            with pytest.raises(NoNode):
                await nodes.choose("j.rollout-1", "remote", 0.1)
            nodes.release("j.rollout-0")
            await start(nodes, of_trainer)

    registered(scenario)


def test_workers_that_come_and_go_with_their_node_give_up_their_slots_and_ranks_wait_for_that() -> None:
    async def scenario(nodes: Nodes) -> None:
        add(nodes, "n1", "0", "1", slots=2)
        node = node_of(nodes, "n1")
        for worker in worker_names(node, 1):
            await nodes.choose(f"j.{worker}", "node:n1", 0.1, devices=1)
        of_trainer = expect(nodes, devices=1)
        starting = asyncio.create_task(start(nodes, of_trainer, 1, within_s=60.0))
        await asyncio.sleep(30.0)
        assert worker_names(node, 1) == ["rollout-n1"] and not starting.done()
        nodes.release("j.rollout-n1.1")
        assert (await starting)["j.trainer.rank1"] == "n1"
        assert nodes.devices_of("j.trainer.rank1") == ("1",), "of whoever has left"

    registered(scenario, "0")


def test_workers_that_stay_keep_their_slots_and_the_whole_trainer_waits_and_says_for_what() -> None:
    async def scenario(nodes: Nodes) -> None:
        add(nodes, "n1", slots=2)
        await nodes.choose("j.rollout-0", "remote", 0.1)
        of_trainer = expect(nodes, 2, 2)
        with pytest.raises(BaseExceptionGroup) as failed:
            await start(nodes, of_trainer, within_s=5.0)
        said = {str(error).partition(" ")[2] for error in failed.value.exceptions}
        (sentence,) = said
        assert sentence.startswith(
            "waits for a node with 2 free slots for ranks 2 and 3; n1 has 1 of 2 free; start one"
        )
        assert sentence.endswith("headrace node --join ADDR (5 s have passed: cluster.wait_s)")
        starting = asyncio.create_task(start(nodes, of_trainer, within_s=60.0))
        await asyncio.sleep(30.0)
        add(nodes, "n2", slots=2)
        nodes._signal()
        assert (await starting)["j.trainer.rank3"] == "n2"

    registered(scenario)


def test_a_node_that_drains_is_left_if_another_has_room_and_else_the_replica_stays() -> None:
    async def scenario(nodes: Nodes) -> None:
        add(nodes, "n1", slots=1)
        of_trainer = expect(nodes)
        await start(nodes, of_trainer)
        nodes.drain("n1", 30.0)
        assert nodes.replicas.nodes_of(TRAINER) == ["n1"] and not nodes.replicas.astray(TRAINER)
        assert nodes.replicas.wanted(TRAINER).startswith("a node with 1 free slot for rank 1; n1 is draining;")
        add(nodes, "n2", slots=1)
        nodes._signal()
        assert nodes.replicas.nodes_of(TRAINER) == ["n2"] and nodes.replicas.astray(TRAINER)
        assert (await start(nodes, of_trainer))["j.trainer.rank1"] == "n2"
        assert not nodes.replicas.astray(TRAINER) and node_of(nodes, "n1").slots_used == 0
        nodes.undrain("n1")
        assert nodes.replicas.nodes_of(TRAINER) == ["n2"], "it stays where it is"

    registered(scenario)


def test_a_node_that_is_cut_off_is_kept_until_its_ranks_start_anew() -> None:
    """It may be back the next moment, with all that it runs; then nothing has to move."""

    async def scenario(nodes: Nodes) -> None:
        for name in ("n1", "n2"):
            add(nodes, name, slots=2)
        of_trainer = expect(nodes, 2, 2)
        await start(nodes, of_trainer)
        lose(nodes, "n1")
        assert not nodes.replicas.astray(TRAINER) and node_of(nodes, "n2").kept == set()
        nodes._nodes["n1"] = nodes._cut_off.pop("n1")
        nodes._signal()
        assert not nodes.replicas.astray(TRAINER) and nodes.replicas.nodes_of(TRAINER) == ["n1"]
        lose(nodes, "n1")
        assert set((await start(nodes, of_trainer)).values()) == {"head", "n2"}
        nodes._nodes["n1"] = nodes._cut_off.pop("n1")
        nodes._signal()
        assert not nodes.replicas.astray(TRAINER) and node_of(nodes, "n1").slots_used == 0

    registered(scenario)


def test_what_a_next_life_of_the_head_finds_running_stays_where_it_runs() -> None:
    async def scenario(nodes: Nodes) -> None:
        for name in ("n1", "n2"):
            add(nodes, name, slots=1)
        expect(nodes)
        nodes.place("j.trainer.rank1", "n2")
        assert nodes.replicas.nodes_of(TRAINER) == ["n2"] and not nodes.replicas.astray(TRAINER)
        assert {node.name: node.slots_used for node in nodes.present} == {"head": 0, "n1": 0, "n2": 1}

    registered(scenario)


def test_nothing_is_kept_for_a_job_that_is_over() -> None:
    async def scenario(nodes: Nodes) -> None:
        add(nodes, "n1", slots=1)
        of_trainer = expect(nodes)
        await start(nodes, of_trainer)
        nodes.release("j.trainer.rank1")
        nodes.expect(TRAINER, (), 0)
        assert node_of(nodes, "n1").slots_used == 0 and nodes.replicas.nodes_of(TRAINER) == []
        assert (await nodes.choose("j.rollout-0", "remote", 0.1)).name == "n1"

    registered(scenario)


def test_a_rank_whose_slot_adopted_workers_have_taken_meanwhile_goes_to_another_node() -> None:
    """A head's next life keeps slots before it knows of all workers that run."""

    async def scenario(nodes: Nodes) -> None:
        add(nodes, "n1", slots=3)
        add(nodes, "n2", slots=2)
        of_trainer = expect(nodes)
        assert nodes.replicas.nodes_of(TRAINER) == ["n1"]
        for worker in ("j.rollout-0", "j.rollout-1", "k.rollout-0"):
            nodes.place(worker, "n1")
        assert (await start(nodes, of_trainer))["j.trainer.rank1"] == "n2"
        for worker in ("k.rollout-1", "k.rollout-2"):
            nodes.place(worker, "n2")
        nodes.release("k.rollout-3")
        assert nodes.replicas.nodes_of(TRAINER) == ["n2"], "it runs there"

    registered(scenario)
