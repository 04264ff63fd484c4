"""Jobs that share the ranks of a training service train what each would train alone on as many, bit for bit."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from actors.core.context import Context
from actors.core.watch import Down
from actors.ranks.errors import RankLost
from actors.ranks.shared import SharedGroup
from actors.train_service.residency import remove_parked
from actors.trainer.backend import BackendSpec, LossSpec, TrainBackend
from actors.trainer.backends.fsdp.core import FsdpCore
from actors.trainer.backends.fsdp.fsdp_backend import FsdpBackend
from actors.trainer.errors import BadMicroBatch, BundleLost, ModelNotLoadable
from actors.trainer.learning.samples import cut
from configs.limits import Limits
from tests.actors.train_service.service_world import SERVICE, ServiceWorld
from tests.contracts.test_train_backend_contract import samples
from tests.rank_processes import RankProcesses
from tests.tiny_checkpoint import make_tiny_checkpoint

LOSS = LossSpec()
QUEUE = {"gap_s": 0.01}
"""A test's jobs take turns within one coroutine: none of them has anything to do while the other has."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def second() -> Iterator[RankProcesses]:
    """The process of rank 1, with followers for the bundles of a service."""
    processes = RankProcesses("shared-fsdp", 2)
    yield processes
    processes.close()


def spec(model_path: Path, job: str) -> BackendSpec:
    """Two jobs that differ in what they learn, and in how."""
    rate, decay = {"a": (0.01, 0.1), "b": (0.003, 0.0)}[job]
    return BackendSpec(model_path=model_path, learning_rate=rate, weight_decay=decay)


async def half_step(backend: TrainBackend, job: str, number: int, half: int) -> None:
    parts = cut(samples(seed=10 * number + ord(job)), budget_tokens=12, keep_zero=False)
    assert len(parts) > 3
    for batch in parts[half::2]:
        await backend.accumulate(batch, LOSS)


async def version(backend: TrainBackend, path: Path) -> bytes:
    await backend.export_segment(path, job="j", policy_version=1, chunk_bytes=1000)
    return path.read_bytes()


async def alone(second: RankProcesses, model_path: Path, job: str, steps: int, path: Path) -> tuple[list[str], bytes]:
    """What the job's steps say, and its weights, if it has the ranks for itself."""
    group = SharedGroup(second.followers(), settle_s=5.0)
    backend = FsdpBackend(group.bundle())
    await backend.start(spec(model_path, job))
    said: list[str] = []
    for number in range(steps):
        await half_step(backend, job, number, 0)
        await half_step(backend, job, number, 1)
        said.append(repr(await backend.step(weight=10.0)))
    weights = await version(backend, path)
    await backend.close()
    return said, weights


async def service(directory: Path, second: RankProcesses, **how: Any) -> ServiceWorld:
    world = ServiceWorld(
        directory, make=None, backend="fsdp", ranks=2, queue=QUEUE, **({"followers": second.followers} | how)
    )
    await world.start()
    return world


@pytest.mark.parametrize(
    ("tiers", "parks"),
    [
        pytest.param({"memory_bytes": 10**9}, False, marks=pytest.mark.long),
        ({}, True),
        pytest.param({"host_bytes": 0, "disk_bytes": 10**9}, True, marks=pytest.mark.long),
    ],
    ids=["resident", "parked in memory", "parked on disk"],
)
async def test_two_jobs_in_turns_over_two_ranks_train_what_each_trains_alone(
    tiers: dict[str, int], parks: bool, second: RankProcesses, model_path: Path, tmp_path: Path
) -> None:
    """The turns come in the middle of a step, too, with gradients that are not applied yet."""
    steps, jobs = 3, ("a", "b")
    expected = {job: await alone(second, model_path, job, steps, tmp_path / job) for job in jobs}
    world = await service(tmp_path / "service", second, **({"memory_bytes": 500_000} | tiers))
    said: dict[str, list[str]] = {job: [] for job in jobs}
    trainers = {job: await world.attached(job, spec(model_path, job)) for job in jobs}
    for number in range(steps):
        for half in (0, 1):
            for job in jobs:
                await half_step(trainers[job].backend, job, number, half)
        for job in jobs:
            said[job].append(repr(await trainers[job].backend.step(weight=10.0)))
    for job in jobs:
        weights = await version(trainers[job].backend, tmp_path / f"shared-{job}")
        assert said[job] == expected[job][0]
        assert weights == expected[job][1]
    assert (world.service._residency.report().parked > 0) == parks
    await world.stop()
    remove_parked(tmp_path / "service")


# ------------------------------------------------------------ what fails, and whose failure it is


class Fatal:
    """Implements ``Followers``: kills the process of rank 1 as it is given an order of ``kind``; empty: of none."""

    def __init__(self, second: RankProcesses) -> None:
        self._second, self._inner = second, second.followers()
        self.kind = b""

    @property
    def count(self) -> int:
        return self._inner.count

    def connect(self, ctx: Context) -> None: ...

    def heard(self, message: Down) -> None: ...

    async def call(
        self, orders: Sequence[bytes], *, timeout_s: float, ends: Callable[[bytes], bool] | None = None
    ) -> list[bytes]:
        if self.kind and self.kind in orders[0]:
            self._second.processes[0].kill()
        return await self._inner.call(orders, timeout_s=timeout_s, ends=ends)

    async def close(self) -> None:
        await self._inner.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def whole_step(backend: TrainBackend, job: str, number: int, path: Path) -> tuple[str, bytes]:
    for half in (0, 1):
        await half_step(backend, job, number, half)
    said = repr(await backend.step(weight=10.0))
    return said, await version(backend, path)


@pytest.mark.long
async def test_an_error_that_leaves_ranks_in_agreement_is_its_jobs_alone(
    second: RankProcesses, model_path: Path, tmp_path: Path
) -> None:
    """One that every rank has met, one that the leader alone has met, and one before any order; b never notices."""
    expected = {job: await alone(second, model_path, job, 2, tmp_path / job) for job in ("a", "b")}
    world = await service(tmp_path / "service", second, memory_bytes=10**9)
    a, b = [(await world.attached(job, spec(model_path, job))).backend for job in ("a", "b")]
    said, _ = await whole_step(b, "b", 0, tmp_path / "v")
    assert said == expected["b"][0][0]
    [batch, *_] = cut(samples(), budget_tokens=12, keep_zero=False)
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(OSError):
        await a.save(tmp_path / "file" / "checkpoint")
    with pytest.raises(BadMicroBatch):
        await a.accumulate(dataclasses.replace(batch, input_ids=batch.input_ids[:, :1]), LOSS)
    missing = await world.trainer("c")
    with pytest.raises(ModelNotLoadable):
        await missing.attach(spec(tmp_path / "nowhere", "a"))
    said, weights = await whole_step(b, "b", 1, tmp_path / "w")
    assert (said, weights) == (expected["b"][0][1], expected["b"][1])
    await world.stop()
    remove_parked(tmp_path / "service")


@pytest.mark.long
async def test_a_rank_that_waits_for_another_after_a_failed_call_ends_the_service(
    second: RankProcesses, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 fails before its first exchange, and rank 1 is in it: nobody could compute any more."""
    world = await service(tmp_path / "service", second, memory_bytes=10**9, limits=Limits(rank_settle_s=0.5))
    a = (await world.attached("a", spec(model_path, "a"))).backend

    def fails(*_: object) -> None:
        raise ValueError("it has failed by itself")

    monkeypatch.setattr(FsdpCore, "accumulate", fails)
    [batch, *_] = cut(samples(), budget_tokens=12, keep_zero=False)
    with pytest.raises(BundleLost):
        await a.accumulate(batch, LOSS)
    ended = await world.system.wait_stopped(SERVICE, 30.0)
    assert isinstance(ended.error, RankLost)
    assert (tmp_path / "service" / "computing").read_text() == "a", "its next life knows whose call it was"
    await world.kill()
    await world.stop()
    remove_parked(tmp_path / "service")


@pytest.mark.long
@pytest.mark.parametrize("kind", [b"accumulate", b"copy_out"])
async def test_after_a_rank_is_killed_jobs_go_on_from_the_state_that_all_ranks_had_stored(
    kind: bytes, second: RankProcesses, model_path: Path, tmp_path: Path
) -> None:
    """In a pass, or in the middle of storing a newer state: the older is whole, and no half of the newer is used."""
    said, weights = await alone(second, model_path, "a", 3, tmp_path / "alone")
    ranks = Fatal(second)
    world = await service(tmp_path / "service", second, followers=lambda: ranks, memory_bytes=10**9)
    first = (await world.attached("a", spec(model_path, "a"))).backend
    stored = world.service._residency._stored.copies
    assert (await whole_step(first, "a", 0, tmp_path / "v0"))[0] == said[0]
    first.committed(1)
    await until(lambda: "a" in stored and stored["a"].manifest.steps == 1)
    ranks.kind = kind
    with contextlib.suppress(BundleLost):  # it depends on when the service stores, and whether that is before the end
        await whole_step(first, "a", 1, tmp_path / "v1")
        first.committed(2)
    ended = await world.system.wait_stopped(SERVICE, 30.0)
    assert isinstance(ended.error, RankLost)
    await world.kill()
    world.followers = second.followers
    await world.start()
    again = await world.attached("a", spec(model_path, "a"))
    assert again.resumed_step == 1
    assert (await whole_step(again.backend, "a", 1, tmp_path / "v1"))[0] == said[1]
    assert await whole_step(again.backend, "a", 2, tmp_path / "v2") == (said[2], weights)
    await world.stop()
    remove_parked(tmp_path / "service")
