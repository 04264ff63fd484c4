"""What an act does to a run that earlier faults have harmed already."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from actors.core.message import Message
from configs.fault_plan import Drop, Target
from supervisors.nemesis.fault_acts import ACTS
from supervisors.nemesis.fault_targets import HEAD, Victim
from supervisors.tree.errors import FaultNotPossible
from transport.address import ActorAddress, PeerId

DROP = Drop(target=Target(link=("head", "weights")), probability=0.3)


def victim(name: str, role: str) -> Victim:
    own = ActorAddress("envoy", PeerId(name, 1))
    return Victim(name, role, "head", 1, name, own, own)


class Ends:
    """A hand that reaches both ends of the link, but for the deaf ones."""

    def __init__(self, *deaf: str) -> None:
        self.deaf = deaf
        self.told: list[str] = []

    async def ends(self, target: Target) -> tuple[list[Victim], list[Victim]]:
        return [victim("head", HEAD)], [victim("weights", "weights")]

    async def order(self, to: ActorAddress, message: Message) -> None:
        if to.peer.name in self.deaf:
            raise FaultNotPossible(f"{to.peer.name} does not answer")
        self.told.append(to.peer.name)


async def drop(hand: Ends) -> list[str]:
    return await ACTS[Drop](cast(Any, hand), DROP, random.Random(0))


async def test_the_head_is_told_last_of_a_fault_on_its_links():
    hand = Ends()
    await drop(hand)
    assert hand.told == ["weights", "head"]


async def test_a_stopped_end_of_a_link_does_not_spare_the_other():
    hand = Ends("weights")
    assert await drop(hand)
    assert hand.told == ["head"]


async def test_a_link_both_of_whose_ends_are_deaf_is_not_harmed_and_that_is_said():
    with pytest.raises(FaultNotPossible, match="does not answer"):
        await drop(Ends("weights", "head"))
