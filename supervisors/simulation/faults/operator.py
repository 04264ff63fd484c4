"""A simulated operator drains and removes training services, as often as the seed says, and undoes that later.

    order ─▶ drain: no job gets a place there          ┐
          └▶ remove: refused while a job has a place   ┴─ heal_s later ─▶ it takes jobs again, or is added again

A service that a job names, or the only one, is never removed: a job that names a removed service is refused for good.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine
from typing import Any, Final

from actors.control.errors import NotFound, NotNow
from configs.scenario import RandomFaults
from configs.services import ServiceConfig
from supervisors.head.service_operations import ServiceOperations
from supervisors.simulation.cluster.world import World

_AGAIN_S: Final = 0.5
"""Seconds after which an operator repeats an order that no head has answered."""
_REFUSED: Final = False
_UNHEARD: Final = None
Act = Callable[[ServiceOperations], Coroutine[Any, Any, Any]]


class Operator:
    """Gives orders to one world. It is ``active`` while orders are yet to come, or not undone."""

    def __init__(self, world: World, spec: RandomFaults) -> None:
        self._world = world
        rng = self._rng = world.rng("operator")
        self._at_s = sorted(rng.uniform(0.0, spec.within_s) for _ in range(rng.randint(*spec.service_orders)))
        self._heal_s = spec.heal_s
        self._open = len(self._at_s)

    @property
    def active(self) -> bool:
        return self._open > 0

    def start(self) -> None:
        """Begin to wait for the times of the orders."""
        for number, at_s in enumerate(self._at_s):
            self._world.in_background(self._give(at_s, number), f"order {number}")

    async def _give(self, at_s: float, number: int) -> None:
        world, services = self._world, self._world.scenario.services
        assert services is not None, "there are no orders without services"
        rng = random.Random(f"{self._rng.random()}/{number}")
        await asyncio.sleep(at_s)
        service = rng.choice(services.services)
        named = {job.trainer.service for job in world.jobs}
        others = [other for other in services.services if other is not service]
        if service.name not in named and others and rng.random() < 0.5:
            await self._remove_service(service, rng)
        else:
            await self._drain_service(service, rng)
        self._open -= 1

    async def _drain_service(self, service: ServiceConfig, rng: random.Random) -> None:
        if await self._order("drain", service.name, lambda head: head.service_drain(service.name)) is _REFUSED:
            return
        await asyncio.sleep(self._length_s(rng))

        async def undrain(head: ServiceOperations) -> bool:
            return head.undrain_service(service.name)

        await self._insist("undrain", service.name, undrain)

    async def _remove_service(self, service: ServiceConfig, rng: random.Random) -> None:
        if await self._order("remove", service.name, lambda head: head.service_remove(service.name)) is _REFUSED:
            return
        await asyncio.sleep(self._length_s(rng))
        values = service.model_dump(mode="json")
        await self._insist("add", service.name, lambda head: head.service_add(values))  # refused if it exists

    async def _insist(self, verb: str, service: str, act: Act) -> None:
        """Give an order until some head answers."""
        while True:
            if await self._order(verb, service, act) is not _UNHEARD:
                return
            await asyncio.sleep(_AGAIN_S)

    async def _order(self, verb: str, service: str, act: Act) -> bool | None:
        """Give an order, and return whether the head has carried it out; None: it died meanwhile, or there is none."""
        world, process = self._world, self._world.head
        if process is None or process.head is None or process.body.halted:
            return _UNHEARD
        task = process.body.life.start(_answer(act(ServiceOperations(process.head))), f"{verb} {service}")
        await world.until(lambda: task.done() or not process.body.alive)
        answer = task.result() if task.done() else "nobody knows"
        world.struck.append(f"{world.loop.time():.3f} s: {verb} {service}: {answer or 'done'}")
        world.trace.note("order", verb=verb, service=service, answer=answer)
        return _UNHEARD if not task.done() else not answer

    def _length_s(self, rng: random.Random) -> float:
        low, high = (max(bound, 0.001) for bound in self._heal_s)
        return math.exp(rng.uniform(math.log(low), math.log(high)))


async def _answer(work: Coroutine[Any, Any, Any]) -> str:
    """Reason for which an order is refused; empty if it is carried out."""
    try:
        await work
    except (NotFound, NotNow) as error:
        return str(error)
    return ""
