"""A version that cannot be pulled for long is told of, in virtual time; one that a restart delays is not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.core.actor import Actor
from actors.core.system import ActorSystem
from actors.rollout.puller import VersionPuller
from tests.simulated import run_simulated
from transport.address import ActorAddress, PeerId
from transport.errors import HeadraceError
from transport.memory_transport import MemoryNetwork, MemoryTransport


class Worker(Actor):
    """Pulls from a server whose every answer is an error."""

    def __init__(self) -> None:
        self.told: list[str] = []

    async def on_start(self) -> None:
        self.puller = VersionPuller(self.ctx, "j", lambda _: None, on_trouble=self.told.append)
        client: Any = self.puller._client

        async def pull(*_: Any) -> Any:
            raise HeadraceError("a chunk is corrupt")

        client.pull = pull
        self.puller.want(1, ActorAddress("weights", PeerId("head", 1)))


@pytest.mark.parametrize(("after_s", "told"), [(4.0, False), (20.0, True)])
def test_pulls_that_fail_for_longer_than_a_restart_takes_are_told_of(after_s: float, told: bool) -> None:
    async def main() -> None:
        system, worker = ActorSystem(MemoryTransport(MemoryNetwork(), PeerId("head", 1))), Worker()
        await system.start()
        await system.spawn("worker", worker)
        await asyncio.sleep(after_s)
        await system.stop()
        assert bool(worker.told) is told
        if told:
            assert worker.told[0].startswith("weights could not be pulled for")
            assert worker.told[0].endswith("and are tried again: a chunk is corrupt")

    run_simulated(main())
