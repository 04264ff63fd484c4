"""What a puller has begun of a version and then does not need: nobody waits for it, and its memory is given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.protocol.weights import ManifestReply
from actors.weights.client import WeightClient
from actors.weights.holding import Holding
from actors.weights.segments import SIMULATED_HOST, Host
from tests.actors.weights.test_pull import JOB
from tests.actors.weights.test_spread import CHUNKS, Worker, World, words

MACHINE = "there"


class Broken:
    """``rollout-0`` has begun version 1 when it is told that ``rollout-1``, beside it, has what it wants."""

    def __init__(self, run_dir: Path) -> None:
        self.memory = run_dir / MACHINE
        self.world = World(run_dir, JOB)

    async def start(self) -> None:
        await self.world.start()
        self.neighbour = await self.world.worker("rollout-1", MACHINE)
        self.puller = await self.world.worker("rollout-0", MACHINE)
        await self.world.publish(1, words(1))
        self.begun = await self._begin(self.puller[0])

    async def _begin(self, worker: Worker) -> Holding:
        client = worker.puller._client
        token = SIMULATED_HOST.set(Host(MACHINE, self.memory))
        try:
            reply = await client._locate(self.world.server.address, 1)
            assert reply.manifest is not None
            return await client._open(reply.manifest, reply)
        finally:
            SIMULATED_HOST.reset(token)

    def files(self) -> set[str]:
        return {file.name.partition("-v")[2] for file in self.memory.iterdir()}


@pytest.fixture
async def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Broken]:
    locate = WeightClient._locate

    async def beside(self: WeightClient, weights: Any, version: int, puller: Any = None, avoid: Any = None) -> Any:
        reply: ManifestReply = await locate(self, weights, version)
        if puller is not None and puller.name == "rollout-0-relay":
            feed = built.world.systems[0].address("rollout-1-relay")
            return msgspec.structs.replace(reply, feed=feed, feed_maps=True)
        return reply

    monkeypatch.setattr(WeightClient, "_locate", beside)
    built = Broken(tmp_path)
    await built.start()
    yield built
    await built.world.stop()


async def test_what_was_begun_goes_when_the_same_version_is_mapped_from_a_neighbour(broken: Broken) -> None:
    """Its pages are allocated: they would stay for good. Who is fed by it is told at once to ask for another feed."""
    fed = asyncio.create_task(broken.begun.until(CHUNKS - 1, 60))
    assert broken.files() == {"1@rollout-0.partial"}
    await broken.world.pull(broken.neighbour, 1)
    assert (await broken.world.pull(broken.puller, 1)).mapped
    async with asyncio.timeout(1):
        assert not await fed
    assert broken.files() == {"1@rollout-1"}


async def test_what_was_begun_goes_when_the_next_version_is_mapped_from_a_neighbour(broken: Broken) -> None:
    await broken.world.publish(2, words(2))
    await broken.world.pull(broken.neighbour, 2)
    assert (await broken.world.pull(broken.puller, 2)).mapped
    assert broken.begun.ended
    assert broken.files() == {"2@rollout-1"}
