"""A version that lies on several machines: real servers, shares and pullers over the in-memory network."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.core.actor import Actor, concurrent, handles
from actors.core.message import Message, message
from actors.core.ref import ActorRef
from actors.core.system import ActorSystem
from actors.protocol.failures import Acknowledged
from actors.protocol.metrics import Event
from actors.protocol.services import LookupService, RegisterService, ServiceChanged, ServiceFound
from actors.protocol.weights import (
    Chunk,
    GetChunks,
    Manifest,
    Publish,
    Published,
    QueryVersions,
    VersionAvailable,
    Versions,
)
from actors.roles import RoleArgs
from actors.rollout.relay import relay_beside
from actors.weights.chunk_server import NotHeld
from actors.weights.client import WeightClient
from actors.weights.errors import MalformedManifest
from actors.weights.manifest import check_manifest, chunk_bounds, chunks_of, cut_for_sources, layout
from actors.weights.segments import SIMULATED_HOST, Host, segment_path
from actors.weights.server import WeightServer
from actors.weights.share import Share
from actors.weights.shares import seal, share_path, write_pieces
from configs.limits import DEFAULT_LIMITS
from configs.names import rank_of
from tests.actors.weights.test_pull import JOB
from transport.address import ActorAddress, PeerId
from transport.errors import HeadraceError
from transport.memory_transport import MemoryNetwork, MemoryTransport

LIMITS = DEFAULT_LIMITS.model_copy(
    update={
        "connect_timeout_s": 0.05,
        "weights_settle_s": 0.01,
        "publish_timeout_s": 0.3,
        "backoff_first_s": 0.01,
        "backoff_max_s": 0.02,
    }
)
CHUNK_BYTES = 64
WORDS = 512
TOTAL_BYTES = 2 * WORDS
SOURCES = ("", "weights.rank1", "weights.rank2")
EVEN = [(at, at // 128 % 2) for at in range(128, TOTAL_BYTES + 1, 128)]
"""Ends of pieces, and the two machines that have them in turn."""


@message("test_shares.pull")
class Pull(Message):
    weights: ActorAddress
    version: int


@message("test_shares.pulled")
class Pulled(Message):
    error: str = ""
    data: bytes = b""
    version: int = -1


class Puller(Actor):
    """Pulls when it is told, and passes on what it has."""

    async def on_start(self) -> None:
        self.client = WeightClient(self.ctx, "j", self._serve)

    async def on_stop(self) -> None:
        self.client.close()

    async def _serve(self) -> ActorAddress:
        return await relay_beside(self.ctx, self.client.held)

    @handles(Pull)
    @concurrent
    async def pull(self, message: Pull) -> Pulled:
        try:
            pulled = await self.client.pull(message.weights, message.version)
        except HeadraceError as error:
            assert not error.permanent, error
            return Pulled(error=str(error))
        return Pulled(data=pulled.tensors["a"].tobytes(), version=pulled.policy_version)


class Scheduler(Actor):
    """Knows who serves what, and keeps what it and the metrics are told."""

    def __init__(self) -> None:
        self.services: dict[str, ActorAddress] = {}
        self.announced: list[int] = []
        self.events: list[Event] = []
        self.changed = 0

    @handles(RegisterService)
    async def register(self, message: RegisterService) -> Acknowledged:
        self.services[message.role] = message.address
        return Acknowledged()

    @handles(LookupService)
    async def lookup(self, message: LookupService) -> ServiceFound:
        return ServiceFound(address=self.services.get(message.role))

    @handles(VersionAvailable)
    async def available(self, message: VersionAvailable) -> None:
        self.announced.append(message.policy_version)

    @handles(Event)
    async def event(self, message: Event) -> None:
        self.events.append(message)

    @handles(ServiceChanged)
    async def service_changed(self, message: ServiceChanged) -> None:
        self.changed += 1


class Mortal(Share):
    """A share that ends in the middle of a pull, after ``left`` further chunks."""

    left = 1 << 30

    @handles(GetChunks)
    @concurrent
    async def get_chunks(self, message: GetChunks) -> AsyncIterator[Chunk]:
        async for chunk in super().get_chunks(message):
            if self.left <= 0:
                self.ctx.stop("killed")
                raise NotHeld("killed")
            self.left -= 1
            yield chunk


class World:
    """The machines of one trainer, each with its own memory, and pullers elsewhere."""

    def __init__(self, directory: Path) -> None:
        self.run_dir = directory / "run"
        self._directory, self._network, self._lives = directory, MemoryNetwork(), 0
        self.systems: dict[str, ActorSystem] = {}
        self.scheduler = Scheduler()
        self.shares: dict[str, Mortal] = {}
        self._places: dict[str, str] = {}
        self.bytes: dict[int, bytes] = {}

    @contextlib.contextmanager
    def on(self, machine: str) -> Iterator[None]:
        memory = self._directory / machine
        memory.mkdir(exist_ok=True)
        token = SIMULATED_HOST.set(Host(machine, memory))
        try:
            yield
        finally:
            SIMULATED_HOST.reset(token)

    async def system(self, machine: str, name: str) -> ActorSystem:
        self._lives += 1
        peer = PeerId(f"{machine}.j.{name}", self._lives)
        system = self.systems[name] = ActorSystem(MemoryTransport(self._network, peer), limits=LIMITS)
        await system.start()
        return system

    def args(self, name: str) -> RoleArgs:
        return RoleArgs(
            role="weights",
            name=name,
            rank=rank_of(name),
            node="n",
            job=JOB.model_dump_json(),
            model_path="",
            run_dir=str(self.run_dir),
            scheduler=self.near.address("scheduler"),
            metrics=self.near.address("scheduler"),
        )

    async def start(self, shares: int = 1) -> None:
        await self.start_server()
        for name in SOURCES[1 : 1 + shares]:
            await self.start_share(name)

    async def start_server(self) -> None:
        with self.on("near"):
            self.near = await self.system("near", "weights")
            await self.near.spawn("scheduler", self.scheduler)
            self._server = WeightServer(self.args("weights"))
            self.server = await self.near.spawn("weights", self._server)

    @property
    def held(self) -> set[int]:
        return set(self._server._held)

    def forget(self) -> None:
        """As after a further share was lost: the server holds nothing, and the first share all that it had."""
        self._server._held.clear()

    async def start_share(self, name: str, machine: str = "") -> None:
        """A first or a further life of a rank's process; by default on the machine that is called as it is."""
        self._places[name] = machine or name
        with self.on(machine or name):
            system = await self.system(machine or name, name)
            self.shares[name] = Mortal(self.args(name))
            await system.spawn(name, self.shares[name])

    async def end_share(self, name: str) -> None:
        self.scheduler.services.pop(name, None)
        await self.systems.pop(name).stop()

    def write(self, version: int, data: bytes, ranges: list[tuple[int, int]], but: str = "nobody") -> Publish:
        """Have each machine write its pieces and seal them; machine ``but`` does not."""
        self.bytes[version] = data
        sources = SOURCES[: 1 + max(source for _, source in ranges)]
        entries, total = layout([("a", "bfloat16", (WORDS,))])
        assert total == len(data) == ranges[-1][0]
        ends, numbers = cut_for_sources(ranges, CHUNK_BYTES)
        bounds = [*pairwise((0, *ends))]
        with self.on("near"):
            path = segment_path(self.run_dir, version)
        hashes: dict[tuple[int, int], bytes] = {}
        for number, source in enumerate(sources):
            own = [cut for cut, one in zip(bounds, numbers, strict=True) if one == number]
            if source == but:
                hashes |= {(start, end): xxhash.xxh3_128_digest(data[start:end]) for start, end in own}
                continue
            with self.on(self._places.get(source, source or "near")):
                at = share_path(path, source)
                write_pieces(at, total, ((start, memoryview(data)[start:end]) for start, end in own))
                hashes |= dict(zip(own, seal(at, own), strict=True))
        manifest = Manifest(
            job="j",
            policy_version=version,
            parent=version - 1,
            total_bytes=total,
            chunk_bytes=CHUNK_BYTES,
            chunk_hashes=tuple(hashes[cut] for cut in bounds),
            tensors=entries,
            sources=sources,
            chunk_ends=ends,
            chunk_sources=numbers,
        )
        return Publish(manifest=manifest, host="near", path=str(path))

    async def publish(self, version: int, data: bytes, ranges: list[tuple[int, int]]) -> None:
        await self.server.ask(self.write(version, data, ranges), Published)

    async def puller(self, name: str = "rollout-0", machine: str = "elsewhere") -> ActorRef:
        with self.on(machine):
            system = await self.system(machine, name)
            await system.spawn(name, Puller())
        return self.near.ref(system.address(name))

    async def pull(self, puller: ActorRef, version: int) -> Pulled:
        pulled = await puller.ask(Pull(weights=self.server.address, version=version), Pulled, timeout_s=10)
        assert pulled.error or pulled.data == self.bytes[pulled.version]
        return pulled

    async def pull_until_whole(self, puller: ActorRef, version: int) -> Pulled:
        async with asyncio.timeout(10):
            while (pulled := await self.pull(puller, version)).error:
                await asyncio.sleep(0.01)
        return pulled

    async def sent(self, name: str = "") -> int:
        server = self.near.ref(self.systems[name].address(name)) if name else self.server
        return (await server.ask(QueryVersions(job="j"), Versions)).sent_bytes

    async def stop(self) -> None:
        for system in [*self.systems.values()]:
            await system.stop()


def data_of(seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 2**16, WORDS, np.uint16).tobytes()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    built = World(tmp_path)
    await built.start()
    yield built
    await built.stop()


cuts = st.lists(st.tuples(st.integers(1, WORDS - 1), st.integers(0, 2)), max_size=12).map(
    lambda drawn: [*((2 * at, source) for at, source in sorted(dict(drawn).items())), (TOTAL_BYTES, 0)]
)


@given(cuts, st.integers(1, 200))
def test_chunks_cover_every_byte_once_and_each_lies_within_what_one_source_has(
    ranges: list[tuple[int, int]], chunk_bytes: int
) -> None:
    ends, sources = cut_for_sources(ranges, chunk_bytes)
    owner = [source for start, (end, source) in zip([0, *(end for end, _ in ranges)], ranges, strict=False)
             for _ in range(start, end)]  # fmt: skip
    for (start, end), source in zip(pairwise((0, *ends)), sources, strict=True):
        assert 0 < end - start <= chunk_bytes
        assert set(owner[start:end]) == {source}
    assert ends[-1] == TOTAL_BYTES


@settings(max_examples=20, deadline=None)
@given(cuts, st.sampled_from(SOURCES[1:]), st.integers(0, 6), st.booleans(), st.booleans())
def test_whatever_the_cut_and_whichever_source_is_lost_a_pull_ends_with_the_whole_version_or_with_a_sentence(
    ranges: list[tuple[int, int]], victim: str, after_chunks: int, is_back: bool, beside: bool
) -> None:
    """Lost in the middle of a pull: what has come is kept, and if the source is back, the rest is fetched."""

    async def check(directory: Path) -> None:
        world = World(directory)
        await world.start(shares=2)
        await world.publish(1, data_of(1), ranges)
        world.shares[victim].left = after_chunks
        puller = await world.puller(machine=victim if beside else "elsewhere")
        first = await world.pull(puller, 1)
        needed = world.write(1, data_of(1), ranges).manifest
        assert bool(first.error) == (victim in needed.sources and len(chunks_of(needed, victim)) > after_chunks)
        await world.end_share(victim)
        if is_back:
            await world.start_share(victim)
            assert (await world.pull_until_whole(puller, 1)).version == 1
        elif first.error:
            lost = await world.pull(puller, 1)
            assert "gone" in lost.error or "reach" in lost.error or victim in lost.error, lost.error
            await world.start_share(victim, "another machine")
            assert (await world.server.ask(QueryVersions(job="j"), Versions)).held == ()
            await world.publish(2, data_of(2), ranges)
            assert (await world.pull_until_whole(puller, -1)).version == 2
        await world.stop()

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(check(Path(directory)))


async def test_each_of_two_machines_sends_half_and_both_at_once(world: World) -> None:
    await world.publish(1, data_of(1), EVEN)
    assert world.scheduler.announced == [1]
    assert (await world.pull(await world.puller(), 1)).version == 1
    assert await world.sent() == await world.sent("weights.rank1") == TOTAL_BYTES // 2


async def test_a_puller_on_either_machine_of_the_trainer_gets_the_rest_from_the_other(world: World) -> None:
    await world.publish(1, data_of(1), EVEN)
    for number, machine in enumerate(("near", "weights.rank1")):
        assert (await world.pull(await world.puller(f"rollout-{number}", machine), 1)).version == 1


async def test_pullers_pass_a_version_of_several_machines_on_to_each_other(world: World) -> None:
    await world.publish(1, data_of(1), EVEN)
    pullers = [await world.puller(f"rollout-{n}", f"machine-{n}") for n in range(6)]
    for pulled in await asyncio.gather(*(world.pull(puller, 1) for puller in pullers)):
        assert not pulled.error
    sent = await world.sent() + await world.sent("weights.rank1")
    assert sent <= LIMITS.relay_children * TOTAL_BYTES < 6 * TOTAL_BYTES


async def test_deltas_come_from_each_machine_for_what_it_has(world: World) -> None:
    puller = await world.puller()
    data = np.frombuffer(data_of(1), np.uint16)
    for version in (1, 2):
        await world.publish(version, (data ^ np.uint16(version == 2) * (np.arange(WORDS) % 64 == 0)).tobytes(), EVEN)
        assert (await world.pull(puller, version)).version == version
    assert await world.sent("weights.rank1") < TOTAL_BYTES


async def test_a_version_is_announced_only_when_every_machine_has_sealed_its_share(world: World) -> None:
    unsealed = world.write(1, data_of(1), EVEN, but="weights.rank1")
    with pytest.raises(HeadraceError, match="version 1 is not whole"):
        await world.server.ask(unsealed, Published)
    assert world.scheduler.announced == []
    assert (await world.server.ask(QueryVersions(job="j"), Versions)).held == ()
    await world.publish(1, data_of(1), EVEN)
    assert world.scheduler.announced == [1]


async def test_a_restarted_weight_server_goes_on_with_its_part_and_finds_the_others(world: World) -> None:
    await world.publish(1, data_of(1), EVEN)
    await world.systems.pop("weights").stop()
    await world.start_server()
    assert world.held == {1}
    assert (await world.pull_until_whole(await world.puller(), 1)).version == 1


async def test_a_damaged_share_is_found_by_a_puller_and_the_version_published_anew(world: World) -> None:
    publish = world.write(1, data_of(1), EVEN)
    await world.server.ask(publish, Published)
    world.scheduler.services["trainer"] = world.near.address("scheduler")
    with world.on("weights.rank1"):
        path = share_path(Path(publish.path), "weights.rank1")
    start, _ = chunk_bounds(publish.manifest, chunks_of(publish.manifest, "weights.rank1")[0])
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes([data_of(1)[start] ^ 1]))
    pulled = await world.pull(await world.puller(), 1)
    assert "stay corrupt" in pulled.error
    async with asyncio.timeout(5):
        while not world.scheduler.changed:
            await asyncio.sleep(0.01)
    assert (await world.server.ask(QueryVersions(job="j"), Versions)).held == ()


async def test_a_trainer_that_has_lost_steps_publishes_older_versions_to_shares_that_still_have_newer_ones(
    world: World,
) -> None:
    for version in (5, 6, 7, 8):
        await world.publish(version, data_of(version), EVEN)
    world.forget()
    await world.publish(4, data_of(40), EVEN)
    await world.publish(5, data_of(50), EVEN)
    puller = await world.puller()
    for version in (4, 5):
        assert (await world.pull(puller, version)).version == version


async def test_the_record_says_how_many_bytes_each_machine_has_served(world: World) -> None:
    await world.publish(1, data_of(1), EVEN)
    await world.pull(await world.puller(), 1)
    await world.publish(2, data_of(2), EVEN)
    await world.pull(await world.puller("rollout-1", "farther"), 2)
    await world.end_share("weights.rank1")
    async with asyncio.timeout(5):
        while len(world.scheduler.events) < 3:
            await asyncio.sleep(0.01)
    rows = [event.fields for event in world.scheduler.events]
    half = TOTAL_BYTES // 2
    assert {"node": "near", "version": 1, "bytes": half} in rows
    assert {"node": "weights", "version": 1, "bytes": half} in rows
    assert {"node": "weights", "version": 2, "bytes": half} in rows


@pytest.mark.parametrize(
    "wrong",
    [
        {"sources": ("weights.rank1", "")},
        {"chunk_sources": (0,)},
        {"chunk_ends": (TOTAL_BYTES,)},
        {"sources": ()},
    ],
    ids=["the server is not first", "a chunk without source", "a chunk is too long", "nobody has it"],
)
def test_a_manifest_whose_sources_do_not_cover_the_version_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    right = World(tmp_path).write(1, data_of(1), EVEN).manifest
    check_manifest(right)
    with pytest.raises(MalformedManifest):
        check_manifest(msgspec.structs.replace(right, **wrong))
