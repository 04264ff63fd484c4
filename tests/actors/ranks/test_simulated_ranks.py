"""Simulated ranks take the time of a call together, and notice whoever was told otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from actors.ranks.errors import RankLost
from actors.ranks.simulated import SimulatedFollower, SimulatedRanks
from actors.rollout.engine_kinds import create_engine
from actors.trainer.setup import leading_backend
from configs.schema import TrainerConfig
from tests.simulated import run_simulated


class Two:
    """Two followers at hand; ``heard`` is what each of them is told of an order."""

    count = 2

    def __init__(self, heard: Callable[[int, bytes], bytes] = lambda rank, order: order) -> None:
        self.followers = [SimulatedFollower(rank, 3) for rank in (1, 2)]
        self._heard = heard
        self.orders: list[Sequence[bytes]] = []

    async def call(self, orders: Sequence[bytes], *, timeout_s: float, ends: object = None) -> list[bytes]:
        self.orders.append(orders)
        heard = [self._heard(rank, order) for rank, order in enumerate(orders, 1)]
        return await asyncio.gather(*(f.serve(order) for f, order in zip(self.followers, heard, strict=True)))

    async def close(self) -> None:
        self.orders = []


def test_all_ranks_take_the_time_of_a_call_at_once() -> None:
    async def main() -> None:
        ranks = SimulatedRanks(Two())
        await ranks.tell("start")
        await ranks.spend("step", 2.5, b"what it is about")
        assert (ranks.count, asyncio.get_running_loop().time()) == (3, 2.5)
        await SimulatedRanks().spend("step", 1.0)
        assert asyncio.get_running_loop().time() == 3.5

    run_simulated(main())


def test_who_was_told_otherwise_than_its_leader_is_lost() -> None:
    async def main() -> None:
        ranks = SimulatedRanks(Two(lambda rank, order: order if rank == 1 else order.replace(b"save", b"step")))
        await ranks.spend("step", 0.1)
        with pytest.raises(RankLost, match="rank 2 was told otherwise than rank 0, up to order 2"):
            await ranks.spend("save", 0.1)

    run_simulated(main())


def test_a_follower_takes_each_order_once_in_turn_and_of_one_life() -> None:
    async def main() -> None:
        one, other = Two(), Two()
        await SimulatedRanks(one, life="a").tell("start")
        await SimulatedRanks(other, life="b").tell("start")
        leader = SimulatedRanks(other, life="b")
        with pytest.raises(RankLost, match="given order 1 of life 'b' after order 1 of life 'b'"):
            await leader.tell("start")
        with pytest.raises(RankLost, match="given order 1 of life 'b' after order 1 of life 'a'"):
            await one.followers[0].serve(other.orders[0][0])

    run_simulated(main())


def test_an_engine_and_a_backend_of_several_ranks_have_as_many_as_they_are_told() -> None:
    assert create_engine("simulated", Two()).kind == "simulated"
    assert leading_backend(TrainerConfig(backend="simulated", ranks=3), Two()).kind == "simulated"
    with pytest.raises(ValueError, match=r"trainer\.ranks: 2, and 3 are there"):
        leading_backend(TrainerConfig(backend="simulated", ranks=2), Two())
