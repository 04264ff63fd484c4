"""A version that spreads over machines: real servers, pullers and relays over the in-memory network."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.core.actor import Actor, concurrent, handles
from actors.core.ref import ActorRef
from actors.core.system import ActorSystem
from actors.protocol.weights import (
    Chunk,
    GetChunks,
    GetSegment,
    Manifest,
    ManifestReply,
    Publish,
    Published,
    QueryVersions,
    SegmentReady,
    Versions,
)
from actors.roles import RoleArgs
from actors.rollout.puller import VersionPuller
from actors.weights import chunk_server, segments
from actors.weights.client import PulledWeights, WeightClient
from actors.weights.delta_source import DeltaSource
from actors.weights.holding import Holding
from actors.weights.manifest import hash_chunks, layout
from actors.weights.memory import damaged_chunks
from actors.weights.pace import Pace
from actors.weights.segments import SIMULATED_HOST, Host
from actors.weights.server import WeightServer
from configs.limits import DEFAULT_LIMITS
from configs.schema import JobConfig
from tests.actors.weights.test_pull import JOB, FakeScheduler
from tests.actors.weights.test_pull import Pull as Want
from tests.actors.weights.test_pull import Pulled as Wanted
from transport.address import ActorAddress, PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport

LIMITS = DEFAULT_LIMITS.model_copy(update={"connect_timeout_s": 1.0, "weights_settle_s": 0.05})
"""Who is told of a feed that has just died looks for it that long."""
CHUNK_BYTES, CHUNKS = 4096, 64
TOTAL_BYTES = CHUNK_BYTES * CHUNKS
RATE = 1 << 40
"""Bytes a second that a puller may pass on."""


class Worker(Actor):
    """As much of a rollout worker as pulls."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.pulled: PulledWeights | None = None

    async def on_start(self) -> None:
        self.puller = VersionPuller(self.ctx, "j", self._on_ready, send_bytes_per_s=RATE)

    async def on_stop(self) -> None:
        self.puller.close()

    def _on_ready(self, _pull_s: float) -> None:
        self.pulled = self.puller.take()
        self.ready.set()

    @handles(Want)
    @concurrent
    async def want(self, message: Want) -> Wanted:
        self.ready.clear()
        self.puller.want(message.version, message.weights)
        async with asyncio.timeout(10):
            await self.ready.wait()
        return Wanted()


class World:
    """One trainer's machine with a weight server; machines with pullers come and go."""

    def __init__(self, run_dir: Path, job: JobConfig) -> None:
        self._run_dir = run_dir
        self._job = job
        self._network = MemoryNetwork()
        self._lives = 0
        self.near = self._system("near")
        self.systems: list[ActorSystem] = []
        self.bytes: dict[int, bytes] = {}

    def _system(self, name: str) -> ActorSystem:
        self._lives += 1
        return ActorSystem(MemoryTransport(self._network, PeerId(name, self._lives)), limits=LIMITS)

    async def start(self) -> None:
        await self.near.start()
        await self.near.spawn("scheduler", FakeScheduler())
        args = RoleArgs(
            role="weights",
            name="weights",
            node="n",
            job=self._job.model_dump_json(),
            model_path="",
            run_dir=str(self._run_dir),
            scheduler=self.near.address("scheduler"),
            metrics=self.near.address("metrics"),
        )
        self.server = await self.near.spawn("weights", WeightServer(args))

    async def worker(self, name: str, machine: str, site: str = "") -> tuple[Worker, ActorRef]:
        """A puller in a process of its own on ``machine``."""
        memory = self._run_dir / machine
        memory.mkdir(parents=True, exist_ok=True)
        token = SIMULATED_HOST.set(Host(machine, memory, site))
        try:
            system, worker = self._system(f"{machine}.{name}"), Worker()
            await system.start()
            self.systems.append(system)
            await system.spawn(name, worker)
        finally:
            SIMULATED_HOST.reset(token)
        return worker, self.near.ref(system.address(name))

    async def publish(self, version: int, data: np.ndarray, shape: tuple[int, ...] = (TOTAL_BYTES // 2,)) -> None:
        entries, total = layout([("a", "bfloat16", shape)])
        assert total == data.nbytes
        self.bytes[version] = data.tobytes()
        path = segments.segment_path(self._run_dir, version)
        path.write_bytes(self.bytes[version])
        manifest = Manifest(
            job="j",
            policy_version=version,
            parent=version - 1,
            total_bytes=total,
            chunk_bytes=CHUNK_BYTES,
            chunk_hashes=hash_chunks(self.bytes[version], CHUNK_BYTES),
            tensors=entries,
        )
        await self.server.ask(Publish(manifest=manifest, host=segments.host_id(), path=str(path)), Published)

    async def pull(self, worker: tuple[Worker, ActorRef], version: int) -> PulledWeights:
        """Have it pull, and see that it got what was published."""
        actor, ref = worker
        await ref.ask(Want(weights=self.server.address, version=version), Wanted, timeout_s=10)
        assert actor.pulled is not None
        assert actor.pulled.tensors["a"].tobytes() == self.bytes[version]
        return actor.pulled

    async def sent_bytes(self) -> int:
        return (await self.server.ask(QueryVersions(job="j"), Versions)).sent_bytes

    async def stop(self) -> None:
        for system in self.systems:
            await system.stop()
        await self.near.stop()
        segments.remove_segments(self._run_dir)


def words(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**16, TOTAL_BYTES // 2, np.uint16)


def nudged(data: np.ndarray, share: float) -> np.ndarray:
    """The last bit of ``share`` of the words, as a step at a low learning rate does."""
    return data ^ (np.random.default_rng(9).random(len(data)) < share).astype(np.uint16)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    built = World(tmp_path, JOB)
    await built.start()
    yield built
    await built.stop()


async def test_eight_machines_get_a_version_and_the_trainers_sends_it_at_most_twice(world: World) -> None:
    """All pull at once; who comes later is fed by who came before, while it is still being fed itself."""
    await world.publish(1, words(1))
    workers = [await world.worker(f"rollout-{n}", f"machine-{n}") for n in range(8)]
    pulled = await asyncio.gather(*(world.pull(worker, 1) for worker in workers))
    assert not any(one.mapped for one in pulled)
    assert await world.sent_bytes() <= 2 * TOTAL_BYTES


async def test_another_data_centre_gets_a_version_once_however_many_machines_it_has(world: World) -> None:
    await world.publish(1, words(1))
    workers = [await world.worker(f"rollout-{n}", f"machine-{n}", "overseas") for n in range(6)]
    await asyncio.gather(*(world.pull(worker, 1) for worker in workers))
    assert await world.sent_bytes() == TOTAL_BYTES


def test_processes_of_a_node_know_its_site(monkeypatch: pytest.MonkeyPatch) -> None:
    assert segments.own_site() == ""
    monkeypatch.setenv(segments.SITE_VARIABLE, "overseas")
    assert segments.own_site() == "overseas"


async def test_of_four_pullers_on_one_machine_one_fetches_and_the_others_map_its_file(world: World) -> None:
    await world.publish(1, words(1))
    workers = [await world.worker(f"rollout-{n}", "there") for n in range(4)]
    pulled = await asyncio.gather(*(world.pull(worker, 1) for worker in workers))
    assert sorted(one.mapped for one in pulled) == [False, True, True, True]
    assert await world.sent_bytes() == TOTAL_BYTES


async def test_version_after_version_each_machine_fetches_it_once_asks_once_and_nobody_complains(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is told of a feed asks it at once: that one must not be named before it expects the version."""
    locate, complaints, questions = WeightClient._locate, list[ActorAddress](), list[str]()

    async def busy(self: WeightClient, *question: Any, avoid: ActorAddress | None = None) -> ManifestReply:
        if avoid is not None:
            complaints.append(avoid)
        questions.append(self._ctx.self_address.name)
        reply = await locate(self, *question, avoid=avoid)
        if self._ctx.self_address.name in ("rollout-0", "rollout-1"):
            await asyncio.sleep(0.05)
        return reply

    monkeypatch.setattr(WeightClient, "_locate", busy)
    workers = [await world.worker(f"rollout-{n}", f"machine-{n % 3}") for n in range(9)]
    for version in range(1, 5):
        before, asked = await world.sent_bytes(), len(questions)
        await world.publish(version, words(version))
        pulled = await asyncio.gather(*(world.pull(worker, version) for worker in workers))
        assert sum(one.mapped for one in pulled) == 6
        assert await world.sent_bytes() - before <= 2 * TOTAL_BYTES
        each = (len(questions) - asked) / len(workers)
        assert each == (2 if version == 1 else 1), "the first answer says that versions are relayed here"
    assert complaints == []


async def test_without_relays_each_machine_is_fed_by_the_server(tmp_path: Path) -> None:
    world = World(tmp_path, JOB.model_copy(update={"weights": JOB.weights.model_copy(update={"relay": False})}))
    await world.start()
    await world.publish(1, words(1))
    workers = [await world.worker(f"rollout-{n}", f"machine-{n}") for n in range(3)]
    await asyncio.gather(*(world.pull(worker, 1) for worker in workers))
    assert await world.sent_bytes() == 3 * TOTAL_BYTES
    await world.stop()


async def test_every_chunk_that_the_server_or_a_relay_sends_keeps_to_its_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, rates = 0, set[float | None]()

    def wait_s(self: Pace, _now_s: float, size_bytes: int) -> float:
        nonlocal sent
        sent += size_bytes
        rates.add(self._bytes_per_s)
        return 1e-4

    monkeypatch.setattr(Pace, "wait_s", wait_s)
    capped = JOB.weights.model_copy(update={"send_bytes_per_s": 5_000_000})
    world = World(tmp_path, JOB.model_copy(update={"weights": capped}))
    await world.start()
    await world.publish(1, words(1))
    for n in range(4):
        await world.pull(await world.worker(f"rollout-{n}", f"machine-{n}"), 1)
    assert sent == 4 * TOTAL_BYTES
    assert rates == {RATE, 5_000_000}
    await world.stop()


async def test_the_next_version_costs_what_has_changed(world: World) -> None:
    """Against the version that the puller holds; passed on as it came; equal bit for bit."""
    workers = [await world.worker(f"rollout-{n}", f"machine-{n}") for n in range(4)]
    await world.publish(1, words(1))
    await asyncio.gather(*(world.pull(worker, 1) for worker in workers))
    before = await world.sent_bytes()
    await world.publish(2, nudged(words(1), 0.01))
    pulled = await asyncio.gather(*(world.pull(worker, 2) for worker in workers))
    assert all(one.wire_bytes < 0.05 * TOTAL_BYTES for one in pulled)
    assert await world.sent_bytes() - before < 2 * 0.05 * TOTAL_BYTES


async def test_a_version_of_which_all_has_changed_comes_whole(world: World) -> None:
    worker = await world.worker("rollout-0", "there")
    await world.publish(1, words(1))
    await world.pull(worker, 1)
    await world.publish(2, words(2))
    assert (await world.pull(worker, 2)).wire_bytes == TOTAL_BYTES


async def test_a_puller_that_skipped_versions_gets_a_delta_against_the_one_that_it_holds(world: World) -> None:
    worker = await world.worker("rollout-0", "there")
    await world.publish(1, words(1))
    await world.pull(worker, 1)
    await world.publish(2, nudged(words(1), 0.5))
    await world.publish(3, nudged(words(1), 0.01))
    assert (await world.pull(worker, 3)).wire_bytes < 0.05 * TOTAL_BYTES


async def test_of_a_version_of_another_layout_no_delta_is_asked_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their bytes stand for other elements, or end elsewhere: what changed is not what differs."""
    asked, deltas = list[int](), WeightServer._deltas

    def note(self: WeightServer, manifest: Manifest, base: int) -> DeltaSource | None:
        asked.append(base)
        return deltas(self, manifest, base)

    monkeypatch.setattr(WeightServer, "_deltas", note)
    worker = await world.worker("rollout-0", "there")
    for version, shape in ((1, (2, TOTAL_BYTES // 4)), (2, (TOTAL_BYTES // 4, 2)), (3, (TOTAL_BYTES // 4, 2))):
        await world.publish(version, nudged(words(1), 0.01 * version), shape)
        pulled = await world.pull(worker, version)
        assert (pulled.wire_bytes == TOTAL_BYTES) == (version < 3)
    assert asked == [-1, -1, 2]


async def test_a_server_that_is_asked_for_a_delta_against_another_layout_sends_whole_chunks(world: World) -> None:
    await world.publish(1, words(1), (2, TOTAL_BYTES // 4))
    await world.publish(2, nudged(words(1), 0.01), (TOTAL_BYTES // 4, 2))
    asked = GetChunks(job="j", policy_version=2, chunks=np.arange(CHUNKS, dtype=np.int32), base=1)
    async with world.server.stream(asked, Chunk, timeout_s=10, credit_items=4) as stream:
        chunks = [chunk async for chunk in stream]
    assert {chunk.base for chunk in chunks} == {-1}
    assert b"".join(chunk.data.tobytes() for chunk in chunks) == world.bytes[2]


async def test_a_delta_is_not_taken_on_trust(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its chunk is checked against the version's own hash, and only that chunk is fetched again."""
    worker = await world.worker("rollout-0", "there")
    await world.publish(1, words(1))
    await world.pull(worker, 1)
    land, spoilt = Holding.land, list[int]()

    def spoil_one(self: Holding, chunks: list[Chunk], base: Holding | None) -> list[int]:
        right = land(self, chunks, base)
        if not spoilt and 5 in right:
            self.view[5 * CHUNK_BYTES + 77] ^= 4
            spoilt.append(5)
            right = [i for i in right if i not in damaged_chunks(self.manifest, self.view, [i])]
        return right

    monkeypatch.setattr(Holding, "land", spoil_one)
    await world.publish(2, nudged(words(1), 0.01))
    await world.pull(worker, 2)
    assert spoilt == [5]


async def test_a_bit_flipped_in_the_base_of_a_delta_costs_a_whole_chunk_and_not_the_version(
    world: World, tmp_path: Path
) -> None:
    """The new version is intact, so nobody would ever let go of it; its delta fits no base but the damaged one."""
    worker = await world.worker("rollout-0", "there")
    await world.publish(1, words(1))
    await world.pull(worker, 1)
    with segments.segment_path(tmp_path, 1).open("r+b") as base:
        base.seek(9 * CHUNK_BYTES + 100)
        base.write(bytes([world.bytes[1][9 * CHUNK_BYTES + 100] ^ 4]))
    await world.publish(2, nudged(words(1), 0.01))
    pulled = await world.pull(worker, 2)
    assert CHUNK_BYTES < pulled.wire_bytes < CHUNK_BYTES + 0.05 * TOTAL_BYTES


async def test_what_a_puller_had_before_is_given_back_soon_and_not_by_its_loop(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """600 MB are not unmapped in a moment, and whoever asks a loop meanwhile would wait."""
    ended = list[threading.Thread]()
    release = Holding.release

    def note(self: Holding) -> None:
        release(self)
        ended.append(threading.current_thread())

    monkeypatch.setattr(Holding, "release", note)
    worker = await world.worker("rollout-0", "there")
    for version in (1, 2, 3):
        await world.publish(version, words(version))
        await world.pull(worker, version)

    def files() -> set[str]:
        return {file.name.partition("-v")[2] for file in (tmp_path / "there").iterdir()}

    async with asyncio.timeout(5):
        while files() != {"3@rollout-0"}:
            await asyncio.sleep(0.01)
    assert len(ended) == 2
    assert threading.main_thread() not in ended


async def test_a_puller_that_was_killed_leaves_no_older_version_in_its_machines_memory(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.publish(1, words(1))
    killed = await world.worker("rollout-0", "there")
    await world.pull(killed, 1)
    own = next((tmp_path / "there").iterdir())
    own.with_name(f"{own.name}0").write_bytes(b"another holder's")
    monkeypatch.setattr(killed[0].puller, "close", lambda: None)
    await world.systems[0].stop()
    await world.publish(2, words(2))
    await world.pull(await world.worker("rollout-0", "there"), 2)
    left = {file.name.partition("-v")[2] for file in (tmp_path / "there").iterdir()}
    assert left == {"2@rollout-0", "1@rollout-00"}


async def test_of_a_chunk_with_a_flipped_bit_only_that_chunk_is_fetched_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, sent = chunk_server._chunk, list[int]()

    def flip_once(manifest: Manifest, view: memoryview, index: int, base: int, delta: bytes | None) -> Chunk:
        chunk = honest(manifest, view, index, base, delta)
        sent.append(index)
        if index == 7 and sent.count(7) == 1:
            data = chunk.data.copy()
            data[100] ^= 1
            return Chunk(policy_version=chunk.policy_version, index=index, data=data)
        return chunk

    monkeypatch.setattr(chunk_server, "_chunk", flip_once)
    await world.publish(1, words(1))
    await world.pull(await world.worker("rollout-0", "there"), 1)
    assert sorted(sent) == sorted([*range(CHUNKS), 7])


async def test_a_puller_that_is_killed_midway_goes_on_in_its_next_life(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was verified lies in the shared memory of its machine; only the rest is fetched."""
    await world.publish(1, words(1))
    worker = await world.worker("rollout-0", "there")
    landed, half = Holding.landed, asyncio.Event()

    def notice(self: Holding, chunks: list[Chunk], right: list[int]) -> None:
        landed(self, chunks, right)
        if len(self.missing) <= CHUNKS // 2:
            half.set()

    def hang(self: Holding, chunks: list[Chunk], right: list[int]) -> None:
        if half.is_set():
            raise RuntimeError("killed")
        notice(self, chunks, right)

    monkeypatch.setattr(Holding, "landed", hang)
    worker[1].tell(Want(weights=world.server.address, version=1))
    async with asyncio.timeout(10):
        await half.wait()
    await world.systems[0].stop()
    monkeypatch.setattr(Holding, "landed", landed)
    before = await world.sent_bytes()
    again = await world.worker("rollout-0", "there")
    pulled = await world.pull(again, 1)
    assert 0 < pulled.wire_bytes <= TOTAL_BYTES // 2
    assert await world.sent_bytes() - before == pulled.wire_bytes


async def test_when_a_relay_dies_those_that_it_fed_are_fed_by_another(world: World) -> None:
    """A chain of three; the middle one goes while the last one waits for it."""
    await world.publish(1, words(1))
    workers = [await world.worker(f"rollout-{n}", f"machine-{n}") for n in range(5)]
    pulls = [asyncio.create_task(world.pull(worker, 1)) for worker in workers]
    await asyncio.sleep(0.02)
    await world.systems[0].stop()
    done = await asyncio.gather(*pulls, return_exceptions=True)
    assert [isinstance(one, PulledWeights) for one in done[1:]] == [True] * 4


async def test_a_relay_that_has_crashed_is_there_again_for_the_next_version(world: World) -> None:
    """Else its puller goes on to be named as a feed, and whoever is sent to it is sent on, version after version."""
    worker = await world.worker("rollout-0", "there")
    await world.publish(1, words(1))
    await world.pull(worker, 1)
    [system] = world.systems
    await system.stop_actor("rollout-0-relay")
    await world.publish(2, words(2))
    await world.pull(worker, 2)
    assert "rollout-0-relay" in system.actors()
    relay = world.near.ref(system.address("rollout-0-relay"))
    assert (await relay.ask(GetSegment(job="j", policy_version=2), SegmentReady)).path.endswith("v2@rollout-0")
