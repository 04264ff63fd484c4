"""One name, two living workers: one was cut off, given up and replaced, and is back. One of them serves, for good."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from actors.core.actor import Actor, handles
from actors.core.errors import RemoteError
from actors.protocol.work import Drain
from actors.protocol.workers import Registered, RegisterWorker
from transport.address import ActorAddress, PeerId

InWorld = Callable[..., None]


class Life(Actor):
    """One life of rollout-0: registers when it is told to, and notes that it is to leave."""

    def __init__(self, scheduler: ActorAddress) -> None:
        self.scheduler = scheduler
        self.told_to_leave: list[str] = []

    @handles(Drain)
    async def drain(self, message: Drain) -> None:
        self.told_to_leave.append(message.reason)

    async def register(self, *, again: bool) -> None:
        offer = RegisterWorker(
            job="j", worker=self.ctx.self_address, node="n", engine="fake", slots=4, policy_version=-1, again=again
        )
        await self.ctx.ref(self.scheduler).ask(offer, Registered)


async def two_lives(world: Any) -> tuple[Life, Life]:
    await world.start_head()
    lives = Life(world.scheduler_at), Life(world.scheduler_at)
    for place, life in zip(("node-1.j.rollout-0", "node-2.j.rollout-0"), lives, strict=True):
        await (await world.system(place)).spawn("rollout-0", life)
    return lives


def serving(world: Any) -> PeerId:
    return world.scheduler._workers.by_name["rollout-0"].address.peer


def test_a_life_that_is_back_does_not_push_out_the_one_that_was_started_in_its_stead(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        cut_off, replacement = await two_lives(world)
        await cut_off.register(again=False)
        await replacement.register(again=False)
        with pytest.raises(RemoteError, match="has replaced"):
            await cut_off.register(again=True)
        assert serving(world) == replacement.ctx.self_address.peer
        assert replacement.told_to_leave == []

    in_world(scenario)


@pytest.mark.parametrize("again", [False, True])
def test_who_is_pushed_out_is_told_to_leave(in_world: InWorld, again: bool) -> None:
    """By a replacement, or, after the scheduler was restarted and nobody knows better, by whoever comes last."""

    async def scenario(world: Any) -> None:
        first, second = await two_lives(world)
        await first.register(again=again)
        await second.register(again=again)
        await asyncio.sleep(0.1)
        assert serving(world) == second.ctx.self_address.peer
        assert (first.told_to_leave, second.told_to_leave) == (["replaced"], [])

    in_world(scenario)


def test_the_same_life_may_register_as_often_as_it_likes(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        life, _ = await two_lives(world)
        await life.register(again=False)
        await life.register(again=True)
        await asyncio.sleep(0.1)
        assert (serving(world), life.told_to_leave) == (life.ctx.self_address.peer, [])

    in_world(scenario)
