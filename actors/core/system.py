"""The actors of one process, from outside: start, spawn, look, stop.

    system = ActorSystem(transport, limits=…, seed=…)
    await system.start()
    ref = await system.spawn("counter", Counter())
    total = await ref.ask(GetTotal(), Total)
    await system.stop()

Invariants
- A process has one system and one transport; the system owns the transport from ``start`` to ``stop``.
- ``stop`` ends every actor, in reverse order of birth, each within ``limits.stop_timeout_s`` or by force.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import cast

from actors.core.actor import Actor
from actors.core.errors import ActorError, UnknownActor
from actors.core.kernel.inbound import Inbound
from actors.core.kernel.router import Router
from actors.core.look import Sight, sight
from actors.core.ref import ActorRef
from actors.core.senders import Guard
from actors.core.watch import ActorExit, Gone
from configs.limits import DEFAULT_LIMITS, Limits
from transport.address import ActorAddress, PeerId
from transport.transport import Transport


class ActorSystem:
    """Hosts actors over one transport. ``seed`` fixes every ``ctx.rng``.

    ``guard`` is asked about every message that comes over a link; without one, any linked peer may send anything.
    """

    def __init__(
        self, transport: Transport, *, limits: Limits = DEFAULT_LIMITS, seed: int = 0, guard: Guard | None = None
    ) -> None:
        self._transport = transport
        self.limits = limits
        self._seed = seed
        self._guard = guard
        self._started: Router | None = None

    @property
    def _router(self) -> Router:
        if self._started is None:
            raise ActorError("the system has not been started: await system.start() first")
        return self._started

    @property
    def peer(self) -> PeerId:
        """Id of this process."""
        return self._transport.peer

    @property
    def endpoint(self) -> str:
        """Address at which this process listens; known after ``start``."""
        return self._transport.endpoint

    async def start(self) -> None:
        """Listen, and take messages on the running loop."""
        self._started = router = Router(self._transport, self.limits, self._seed)
        await self._transport.start(Inbound(router, router.deaths, router.streams, self._guard))
        router.lag.start()

    async def spawn(self, name: str, actor: Actor) -> ActorRef:
        """Start an actor; returns when its ``on_start`` is done.

        Raises:
            StartFailed: ``on_start`` raised, or took longer than ``limits.ready_timeout_s``.
            NameTaken: an actor of that name lives here.
        """
        cell = await self._router.spawn(name, actor)
        return ActorRef(self._router, cell.address)

    def ref(self, address: ActorAddress) -> ActorRef:
        """A ref for code outside of actors."""
        return ActorRef(self._router, address)

    def address(self, name: str) -> ActorAddress:
        """The address that an actor of that name has, or would have, here."""
        return ActorAddress(name, self.peer, self.endpoint)

    def actors(self) -> list[str]:
        """Names of the actors that live here, in order of birth."""
        return list(self._router.cells)

    def hosted(self, name: str) -> Actor | None:
        """The actor of that name that lives here, for tests and simulations, which look at it from outside."""
        cell = self._router.cells.get(name)
        return None if cell is None else cast(Actor, cell.actor)

    async def connect(self, endpoint: str, timeout_s: float | None = None) -> PeerId:
        """Open a link to the process that listens at ``endpoint``; returns its id.

        Raises:
            HandshakeRefused, LinkTimeout.
        """
        return await self._transport.connect(endpoint, timeout_s=timeout_s or self.limits.connect_timeout_s)

    async def wait_stopped(self, name: str, timeout_s: float | None = None) -> ActorExit:
        """Wait for an actor to end, within ``timeout_s`` if given; returns at once if it has ended already.

        Raises:
            UnknownActor: none of that name has lived here.
            TimeoutError: it has not ended within ``timeout_s``.
        """
        router = self._router
        cell = router.cells.get(name)
        if cell is None:
            if name not in router.exits:
                raise UnknownActor(f"no actor {name!r} has lived at {self.peer}")
            return router.exits[name]
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(cell.ended)

    async def stop_actor(self, name: str, reason: str = "stopped") -> ActorExit:
        """End one actor after the message that it handles, or by force after ``limits.stop_timeout_s``.

        Raises:
            UnknownActor: none of that name has lived here.
        """
        cell = self._router.cells.get(name)
        if cell is None:
            return await self.wait_stopped(name)
        return await self._router.stop_cell(cell, reason)

    def counters(self) -> Counter[str]:
        """Counts of unusual events in this process, by name."""
        return self._router.counters + self._router.links.counters

    def sight(self, longer_than_s: float = 0.0) -> Sight:
        """Who waits in this process, which messages found no receiver, and how late its loop is."""
        return sight(self._router, longer_than_s)

    async def stop(self) -> None:
        """End all actors, youngest first, say goodbye to the peers, close the transport. Idempotent."""
        router = self._router
        if router.stopping:
            return
        router.stopping = True
        router.lag.stop()
        for cell in reversed(list(router.cells.values())):
            await router.stop_cell(cell)
        router.links.close()
        await self._transport.close(timeout_s=self.limits.close_timeout_s)
        router.requests.fail_all("this system has stopped", Gone.STOPPED)
