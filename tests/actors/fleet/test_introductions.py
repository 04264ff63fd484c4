"""A scheduler that was started again knows nobody: whoever comes back last must still find the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from actors.core.actor import Actor, handles
from actors.protocol.failures import Acknowledged
from actors.protocol.services import RegisterService, ServiceChanged
from transport.address import ActorAddress

InWorld = Callable[..., None]


class Service(Actor):
    """Registers when it is told to, and notes who it is told of."""

    def __init__(self, scheduler: ActorAddress, role: str) -> None:
        self.scheduler, self.role = scheduler, role
        self.told: list[ActorAddress] = []

    @handles(ServiceChanged)
    async def changed(self, news: ServiceChanged) -> None:
        self.told.append(news.address)

    async def register(self) -> None:
        offer = RegisterService(job="j", role=self.role, address=self.ctx.self_address)
        await self.ctx.ref(self.scheduler).ask(offer, Acknowledged)


@pytest.mark.parametrize("order", [("weights", "trainer"), ("trainer", "weights")])
def test_the_trainer_hears_where_the_weights_are_whichever_of_the_two_registers_last(
    in_world: InWorld, order: tuple[str, str]
) -> None:
    async def scenario(world: Any) -> None:
        await world.start_head()
        services = {role: Service(world.scheduler_at, role) for role in order}
        for role, service in services.items():
            await (await world.system(role)).spawn(role, service)
        for role in order:
            await services[role].register()
            await asyncio.sleep(0.1)
        assert services["trainer"].told == [services["weights"].ctx.self_address]

    in_world(scenario)
