"""What an act does to a run that earlier faults have harmed already."""

from __future__ import annotations

import random

import pytest

from actors.core.message import Message
from configs.fault_plan import Drop, Kill, Target
from supervisors.nemesis.fault_acts import commit
from supervisors.nemesis.fault_targets import HEAD, Victim
from supervisors.nemesis.live_cluster import LiveCluster
from supervisors.tree.errors import FaultNotPossible
from transport.address import ActorAddress, PeerId

DROP = Drop(target=Target(link=("head", "weights")), probability=0.3)
KILL = Kill(target=Target(role="rollout", count=2))


def victim(name: str, role: str) -> Victim:
    own = ActorAddress("reporter", PeerId(name, 1))
    return Victim(name, role, "head", 1, name, own, own)


class HarmedCluster(LiveCluster):
    """Reaches both ends of the link and both workers, but for the deaf ones."""

    def __init__(self, *deaf: str) -> None:
        self.deaf = deaf
        self.told: list[str] = []

    async def ends(self, target: Target) -> tuple[list[Victim], list[Victim]]:
        return [victim("head", HEAD)], [victim("weights", "weights")]

    async def victims(self, target: Target, rng: random.Random) -> list[Victim]:
        return [victim("rollout-0", "rollout"), victim("rollout-1", "rollout")]

    async def order(self, to: ActorAddress, message: Message) -> None:
        if to.peer.name in self.deaf:
            raise FaultNotPossible(f"{to.peer.name} does not answer")
        self.told.append(to.peer.name)


async def drop(cluster: HarmedCluster) -> list[str]:
    return (await commit(cluster, DROP, random.Random(0))).names


async def test_the_head_is_told_last_of_a_fault_on_its_links():
    cluster = HarmedCluster()
    await drop(cluster)
    assert cluster.told == ["weights", "head"]


async def test_a_stopped_end_of_a_link_does_not_spare_the_other():
    cluster = HarmedCluster("weights")
    assert await drop(cluster)
    assert cluster.told == ["head"]


async def test_a_link_both_of_whose_ends_are_deaf_is_not_harmed_and_that_is_said():
    with pytest.raises(FaultNotPossible, match="does not answer"):
        await drop(HarmedCluster("weights", "head"))


async def test_a_victim_that_cannot_be_hit_does_not_spare_the_other():
    hit = await commit(HarmedCluster("rollout-0"), KILL, random.Random(0))
    assert hit.names == ["rollout-1 (process 1 on head)"]


async def test_a_fault_none_of_whose_victims_can_be_hit_says_why():
    with pytest.raises(FaultNotPossible, match="rollout-0 does not answer"):
        await commit(HarmedCluster("rollout-0", "rollout-1"), KILL, random.Random(0))
