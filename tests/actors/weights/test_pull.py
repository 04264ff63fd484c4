"""Publishing and pulling, by mapping and by chunks, with the real server and client over the in-memory network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from actors.core.actor import Actor, handles
from actors.core.message import Message, message
from actors.core.system import ActorSystem
from actors.protocol.failures import Acknowledged
from actors.protocol.services import LookupService, RegisterService, ServiceChanged, ServiceFound
from actors.protocol.weights import (
    Manifest,
    Publish,
    Published,
    QueryVersions,
    SegmentDamaged,
    VersionAvailable,
    Versions,
)
from actors.roles import RoleArgs
from actors.weights import chunk_server, memory, segments
from actors.weights import client as client_module
from actors.weights import server as server_module
from actors.weights.client import PulledWeights, WeightClient
from actors.weights.errors import VersionNotHeld
from actors.weights.manifest import hash_chunks, layout
from actors.weights.mapped import Mapped
from actors.weights.memory import SegmentWriter
from actors.weights.server import WeightServer
from configs.limits import DEFAULT_LIMITS
from tests.smallest_job import smallest_job
from transport.address import ActorAddress, PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport
from transport.transport import Lane, queue_bounds
from transport.zmq.options import lane_options

JOB = smallest_job()


@message("test_pull.pull")
class Pull(Message):
    weights: ActorAddress
    version: int


@message("test_pull.pulled")
class Pulled(Message):
    error: str = ""


class FakeScheduler(Actor):
    def __init__(self) -> None:
        self.announced: list[int] = []
        self.trainer: ActorAddress | None = None

    @handles(RegisterService)
    async def register(self, message: RegisterService) -> Acknowledged:
        return Acknowledged()

    @handles(LookupService)
    async def lookup(self, message: LookupService) -> ServiceFound:
        return ServiceFound(address=self.trainer if message.role == "trainer" else None)

    @handles(VersionAvailable)
    async def available(self, message: VersionAvailable) -> None:
        self.announced.append(message.policy_version)


class FakeTrainer(Actor):
    def __init__(self) -> None:
        self.told: list[ServiceChanged] = []

    @handles(ServiceChanged)
    async def changed(self, message: ServiceChanged) -> None:
        self.told.append(message)


class Puller(Actor):
    def __init__(self) -> None:
        self.pulled: PulledWeights | None = None

    async def on_start(self) -> None:
        self.client = WeightClient(self.ctx, "j")

    @handles(Pull)
    async def pull(self, message: Pull) -> Pulled:
        try:
            self.pulled = await self.client.pull(message.weights, message.version)
        except VersionNotHeld as error:
            return Pulled(error=str(error))
        return Pulled()


class Bench:
    """A scheduler, a weight server and a puller in two systems."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        network = MemoryNetwork()
        limits = DEFAULT_LIMITS.model_copy(update={"weights_settle_s": 0.01})
        self.near = ActorSystem(MemoryTransport(network, PeerId("near", 1)), limits=limits)
        self.far = ActorSystem(MemoryTransport(network, PeerId("far", 2)))
        self.scheduler, self.puller = FakeScheduler(), Puller()

    async def start(self) -> None:
        await self.near.start()
        await self.far.start()
        await self.near.spawn("scheduler", self.scheduler)
        await self.start_server()
        self._pull = await self.far.spawn("puller", self.puller)

    async def start_server(self) -> None:
        args = RoleArgs(
            role="weights",
            name="weights",
            node="n",
            job=JOB.model_dump_json(),
            model_path="",
            run_dir=str(self.run_dir),
            scheduler=self.near.address("scheduler"),
            metrics=self.near.address("metrics"),
        )
        self.server = await self.near.spawn("weights", WeightServer(args))

    async def publish(
        self, version: int, value: float, path: Path | None = None, write: Callable[[memoryview], object] | None = None
    ) -> Published:
        entries, total = layout([("a", "float32", (300,)), ("b", "bfloat16", (5,))])
        data = bytearray(total)
        data[:1200] = np.full(300, value, np.float32).tobytes()
        path = path or segments.segment_path(self.run_dir, version)
        (write or path.write_bytes)(memoryview(data))
        manifest = Manifest(
            job="j",
            policy_version=version,
            parent=version - 1,
            total_bytes=total,
            chunk_bytes=256,
            chunk_hashes=hash_chunks(data, 256),
            tensors=entries,
        )
        order = Publish(manifest=manifest, host=segments.host_id(), path=str(path))
        return await self.server.ask(order, Published)

    async def pull(self, version: int) -> PulledWeights:
        answer = await self._pull.ask(Pull(weights=self.server.address, version=version), Pulled)
        if answer.error:
            raise VersionNotHeld(answer.error)
        assert self.puller.pulled is not None
        return self.puller.pulled


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    built = Bench(tmp_path)
    await built.start()
    yield built
    await built.far.stop()
    await built.near.stop()
    segments.remove_segments(tmp_path)


async def test_a_puller_on_the_same_machine_maps_what_was_published(bench: Bench) -> None:
    """The tensors are those that were published, and the scheduler was told."""
    assert (await bench.publish(1, 0.5)).newest == 1
    pulled = await bench.pull(1)
    assert pulled.mapped
    assert np.all(pulled.tensors["a"] == 0.5)
    assert pulled.dtypes == {"a": "float32", "b": "bfloat16"}
    assert bench.scheduler.announced == [1]


async def test_a_puller_on_another_machine_streams_the_chunks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes, over the bulk lane."""
    await bench.publish(1, 0.25)
    monkeypatch.setattr(client_module, "host_id", lambda: "elsewhere")
    pulled = await bench.pull(-1)
    assert not pulled.mapped
    assert np.all(pulled.tensors["a"] == 0.25)


async def test_what_the_trainer_prepares_is_in_the_servers_reach_before_it_is_published(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a pull enters no page: it would fail here if it did."""
    monkeypatch.setattr(memory, "PARALLEL_BYTES", 1)
    monkeypatch.setattr(server_module, "PARALLEL_BYTES", 1)
    entered, enter = asyncio.Event(), WeightServer._enter

    async def entering(server: WeightServer, mapped: Mapped) -> None:
        await enter(server, mapped)
        entered.set()

    monkeypatch.setattr(WeightServer, "_enter", entering)
    await bench.publish(0, 0.5)
    writer, newest = SegmentWriter(), segments.segment_path(bench.run_dir, 0)
    await asyncio.to_thread(writer.prepare, newest, newest.stat().st_size)
    async with asyncio.timeout(20):
        await entered.wait()
    monkeypatch.setattr(chunk_server, "warm_chunks", None)
    monkeypatch.setattr(client_module, "host_id", lambda: "elsewhere")
    path = segments.segment_path(bench.run_dir, 1)
    await bench.publish(1, 1.5, write=lambda data: writer.write(path, data, 256))
    pulled = await bench.pull(1)
    assert not pulled.mapped
    assert float(pulled.tensors["a"][299]) == 1.5
    writer.close()


async def test_a_segment_with_a_flipped_bit_is_never_served(bench: Bench) -> None:
    """Mapping is refused, and so is every chunk that holds the bit: the puller ends with an error, not with weights."""
    await bench.publish(1, 0.5)
    path = segments.segment_path(bench.run_dir, 1)
    data = bytearray(path.read_bytes())
    data[700] ^= 4
    path.write_bytes(data)
    with pytest.raises(Exception, match="chunks \\[2\\] stay corrupt"):
        await bench.pull(1)
    assert bench.puller.pulled is None


async def test_a_damaged_segment_is_let_go_and_published_again_by_its_trainer(bench: Bench) -> None:
    """The complaint of a puller is looked into, and what is damaged is published anew, once."""
    trainer = FakeTrainer()
    await bench.near.spawn("trainer", trainer)
    bench.scheduler.trainer = bench.near.address("trainer")
    await bench.publish(1, 0.5)
    path = segments.segment_path(bench.run_dir, 1)
    path.write_bytes(bytes(len(path.read_bytes())))
    with pytest.raises(Exception, match="stay corrupt"):
        await bench.pull(1)
    async with asyncio.timeout(5):
        while not trainer.told:
            await asyncio.sleep(0.01)
    assert (await bench.server.ask(QueryVersions(job="j"), Versions)).held == ()
    assert not path.exists()
    assert trainer.told == [ServiceChanged(job="j", role="weights", address=bench.server.address)]
    bench.server.tell(SegmentDamaged(job="j", policy_version=1))
    await bench.publish(1, 0.75)
    bench.puller = Puller()
    bench._pull = await bench.far.spawn("another puller", bench.puller)
    assert np.all((await bench.pull(1)).tensors["a"] == 0.75)
    assert len(trainer.told) == 1


async def test_a_complaint_about_an_intact_segment_changes_nothing(bench: Bench) -> None:
    await bench.publish(1, 0.5)
    bench.server.tell(SegmentDamaged(job="j", policy_version=1))
    await asyncio.sleep(0.2)
    assert (await bench.server.ask(QueryVersions(job="j"), Versions)).held == (1,)


async def test_old_versions_retire_and_are_refused(bench: Bench) -> None:
    """The server keeps the newest few; who asks for an older one is told to ask anew."""
    for version in range(1, 7):
        await bench.publish(version, float(version))
    assert np.all((await bench.pull(3)).tensors["a"] == 3.0)
    with pytest.raises(VersionNotHeld, match="version 2"):
        await bench.pull(2)
    async with asyncio.timeout(5):
        while segments.segment_path(bench.run_dir, 2).exists():  # it goes on the server's thread
            await asyncio.sleep(0.01)


async def test_a_version_that_is_published_again_stays_what_it_was_and_is_announced_once(
    bench: Bench, tmp_path: Path
) -> None:
    """Versions are immutable: whoever has begun to pull one would otherwise end with a mixture that fits no hash."""
    for version in range(1, 6):
        await bench.publish(version, float(version))
    assert (await bench.publish(4, 0.75, tmp_path / "another")).newest == 5
    assert (await bench.publish(5, 0.75, tmp_path / "another")).newest == 5
    assert np.all((await bench.pull(4)).tensors["a"] == 4.0)
    assert np.all((await bench.pull(5)).tensors["a"] == 5.0)
    assert (await bench.server.ask(QueryVersions(job="j"), Versions)).held == (2, 3, 4, 5)
    assert bench.scheduler.announced == [1, 2, 3, 4, 5]


async def test_a_server_that_died_goes_on_with_what_it_held(bench: Bench) -> None:
    """Its successor finds the segments in shared memory and announces the newest."""
    await bench.publish(4, 4.0)
    await bench.publish(5, 5.0)
    await bench.near.stop_actor("weights")
    await bench.start_server()
    assert np.all((await bench.pull(-1)).tensors["a"] == 5.0)
    assert bench.scheduler.announced == [4, 5, 5]


def test_the_window_of_a_pull_goes_out_without_the_socket_being_full() -> None:
    """Else every other chunk is offered twice, and its credit in bytes would be spent before its credit in chunks."""
    options = lane_options(Lane.BULK, queue_bounds(DEFAULT_LIMITS)[Lane.BULK], DEFAULT_LIMITS)
    assert options.hwm_messages >= client_module.WINDOW_CHUNKS
    assert client_module.WINDOW_CHUNKS * DEFAULT_LIMITS.bulk_chunk_bytes <= DEFAULT_LIMITS.stream_credit_bytes
