"""Chunks that nobody can mean, asked for or sent: whoever gets them says no, and goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from actors.core.errors import RemoteError
from actors.core.ref import ActorRef
from actors.protocol.weights import Chunk, GetChunks, Manifest
from actors.weights.delta import apply_delta
from actors.weights.errors import MalformedDelta
from actors.weights.holding import Holding
from actors.weights.manifest import hash_chunks
from tests.actors.weights.test_pull import JOB
from tests.actors.weights.test_spread import CHUNKS, World, words

NO_CHUNKS = {
    "a number": np.array(3, np.int32),
    "a table": np.zeros((2, 2), np.int32),
    "fractions": np.array([0.5], np.float32),
    "wider numbers": np.array([1], np.int64),
    "more than there are": np.zeros(CHUNKS + 1, np.int32),
    "one too high": np.array([0, CHUNKS], np.int32),
    "one too low": np.array([0, -1], np.int32),
}
NO_BYTES = {
    "a number": np.array(3, np.uint8),
    "an empty table": np.zeros((0, 3), np.uint8),
    "a table": np.zeros((100, 1), np.uint8),
    "fractions": np.zeros(100, np.float32),
}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    built = World(tmp_path, JOB)
    await built.start()
    await built.publish(1, words(1))
    yield built
    await built.stop()


async def fetched(ref: ActorRef, chunks: np.ndarray) -> list[Chunk]:
    asked = GetChunks(job="j", policy_version=1, chunks=chunks)
    async with ref.stream(asked, Chunk, timeout_s=10, credit_items=4) as stream:
        return [chunk async for chunk in stream]


@pytest.mark.parametrize("chunks", NO_CHUNKS.values(), ids=NO_CHUNKS)
async def test_a_server_or_a_relay_that_is_asked_for_what_are_no_chunks_says_so_and_goes_on(
    world: World, chunks: np.ndarray
) -> None:
    await world.pull(await world.worker("rollout-0", "there"), 1)
    stranger = world.systems[0]
    for ref in (stranger.ref(world.server.address), world.near.ref(stranger.address("rollout-0-relay"))):
        with pytest.raises(RemoteError) as caught:
            await fetched(ref, chunks)
        assert caught.value.declared and caught.value.error_type in ("NotHeld", "NotOnTheShelf")
        assert [chunk.index for chunk in await fetched(ref, np.array([3], np.int32))] == [3]


@pytest.mark.parametrize("data", NO_BYTES.values(), ids=NO_BYTES)
@pytest.mark.parametrize("base", [-1, 0], ids=["whole", "delta"])
def test_a_chunk_whose_data_are_no_row_of_bytes_does_not_land(data: np.ndarray, base: int) -> None:
    """Neither as bytes nor as a delta; it is fetched again like one with a wrong bit."""
    old = bytes(100)
    manifest = Manifest(
        job="j", policy_version=1, parent=0, total_bytes=100, chunk_bytes=100,
        chunk_hashes=hash_chunks(bytes(range(100)), 100), tensors=(),
    )  # fmt: skip
    former = Holding(manifest, Path("former"), memoryview(old), set(), own=False)
    holding = Holding(manifest, Path("new"), memoryview(bytearray(100)), {0}, own=True)
    assert holding.land([Chunk(policy_version=1, index=0, data=data, base=base)], former) == []


@pytest.mark.parametrize("delta", [NO_BYTES[kind] for kind in ("a number", "an empty table", "a table")])
def test_a_delta_that_is_no_row_is_malformed(delta: np.ndarray) -> None:
    with pytest.raises(MalformedDelta):
        apply_delta(delta, bytes(4), memoryview(bytearray(4)))
