"""A worker acts under a lease: who does not renew it is given up, and what it held goes on elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from actors.core.actor import Actor, handles
from actors.core.errors import RemoteError
from actors.core.tenure import LeaseRenewed, RenewLease
from actors.protocol.work import Assign
from actors.protocol.workers import Registered, RegisterWorker
from configs.limits import DEFAULT_LIMITS
from transport.address import ActorAddress

InWorld = Callable[..., None]


class Mute(Actor):
    """Registers and takes work; its link is up, and that is all that is heard of it."""

    def __init__(self, scheduler: ActorAddress) -> None:
        self.scheduler = scheduler
        self.assigned = 0
        self.issued: Registered

    async def on_start(self) -> None:
        offer = RegisterWorker(
            job="j", worker=self.ctx.self_address, node="n", engine="fake", slots=4, policy_version=0
        )
        self.issued = await self.ctx.ref(self.scheduler).ask(offer, Registered)

    @handles(Assign)
    async def assign(self, order: Assign) -> None:
        self.assigned += sum(len(work.samples) for work in order.work)

    async def renew(self, lease: int) -> LeaseRenewed:
        question = RenewLease(job="j", holder=self.ctx.self_address.name, lease=lease)
        return await self.ctx.ref(self.scheduler).ask(question, LeaseRenewed)


def test_the_samples_of_a_worker_that_does_not_renew_go_on_elsewhere(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start_head()
        await world.start_rewards()
        mute = Mute(world.scheduler_at)
        await (await world.system("rollout-9")).spawn("rollout-9", mute)
        await world.start_trainer()
        await world.until(lambda: mute.assigned > 0)
        began_s = asyncio.get_running_loop().time()
        await world.start_worker("rollout-0")
        assert await world.job.wait_over(60.0) == "finished"
        assert "rollout-9" not in world.scheduler._workers.by_name
        took_s = asyncio.get_running_loop().time() - began_s
        assert took_s > DEFAULT_LIMITS.lease_s - DEFAULT_LIMITS.scheduler_tick_s - 1.0

    in_world(scenario)


def test_a_lease_is_renewed_for_its_own_life_and_number_only(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start_head()
        mute, other = Mute(world.scheduler_at), Mute(world.scheduler_at)
        await (await world.system("rollout-9")).spawn("rollout-9", mute)
        for _ in range(3):
            await asyncio.sleep(DEFAULT_LIMITS.lease_s - 1.0)
            assert (await mute.renew(mute.issued.lease)).lease_s == DEFAULT_LIMITS.lease_s
        with pytest.raises(RemoteError, match="register anew"):
            await mute.renew(mute.issued.lease + 1)
        await (await world.system("elsewhere")).spawn("rollout-9", other)
        assert other.issued.lease > mute.issued.lease
        with pytest.raises(RemoteError, match="register anew"):
            await mute.renew(mute.issued.lease)

    in_world(scenario)


def test_a_lapsed_lease_is_not_renewed_any_more(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start_head()
        mute = Mute(world.scheduler_at)
        await (await world.system("rollout-9")).spawn("rollout-9", mute)
        await asyncio.sleep(DEFAULT_LIMITS.lease_s + 2 * DEFAULT_LIMITS.scheduler_tick_s)
        assert "rollout-9" not in world.scheduler._workers.by_name
        with pytest.raises(RemoteError, match="register anew"):
            await mute.renew(mute.issued.lease)

    in_world(scenario)
