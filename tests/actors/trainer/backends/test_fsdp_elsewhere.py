"""Two ranks of one copy of the weights on two machines: the same bits as on one, checkpoints in the leader's files
alone, versions in a share of each machine.

They meet at an address of loopback over gloo, and the leader says that it is on another machine than the follower.
Whether they have a file system in common they find out by themselves: they have one, unless each calls the file that
shows it by another name.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as parameter_group

from actors.trainer.backend import CriticSpec, TrainBackend
from actors.trainer.backends.fsdp import parts, world
from actors.trainer.backends.fsdp.fsdp_backend import FsdpBackend
from actors.trainer.errors import CheckpointCorrupt
from actors.trainer.learning.samples import cut
from actors.weights.manifest import check_manifest, chunk_bounds, chunk_is_intact
from actors.weights.segments import memory_of
from actors.weights.shares import share_path
from benchmarks.gpu._model_family import make_model
from benchmarks.gpu.model_families import FAMILIES
from configs.limits import Limits
from tests.actors.trainer.backends.test_fsdp import ADAPTER, LOSS, THIN, samples, spec, train, values, whole
from tests.chaos.rank_runs import held_in
from tests.rank_processes import RankProcesses
from tests.tiny_checkpoint import make_tiny_checkpoint

Begin = Callable[..., Awaitable[FsdpBackend]]
PROBE = world.PROBE
RUN = f"{os.getpid():032x}"
"""Id of a run whose shares lie in this machine's shared memory."""


@pytest.fixture(autouse=True, scope="module")
def _no_shares_stay() -> Iterator[None]:
    yield
    shutil.rmtree(memory_of(RUN), ignore_errors=True)


async def version(backend: TrainBackend, directory: Path, name: str = "v") -> bytes:
    """The bytes that are published, put together from the shares of all machines, each chunk checked."""
    (directory / name).mkdir(parents=True, exist_ok=True)
    path = directory / name / f"headrace-{RUN}-v1"
    manifest = await backend.export_segment(path, job="j", policy_version=1, chunk_bytes=1000)
    check_manifest(manifest)
    shares = [share_path(path, source).read_bytes() for source in manifest.sources or ("",)]
    sources = manifest.chunk_sources or (0,) * len(manifest.chunk_hashes)
    chunks = [shares[source][slice(*chunk_bounds(manifest, index))] for index, source in enumerate(sources)]
    assert all(chunk_is_intact(manifest, index, chunk) for index, chunk in enumerate(chunks))
    return b"".join(chunks)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def second() -> Iterator[RankProcesses]:
    processes = RankProcesses("fsdp", 2)
    yield processes
    processes.close()


@pytest.fixture
async def begin(model_path: Path, second: RankProcesses, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Begin]:
    """Starts two ranks, on two machines if ``apart``. What is begun anew ends what was there."""
    started: list[FsdpBackend] = []

    async def begun(*, apart: bool, shares: bool = False, path: Path = model_path, **changes: Any) -> FsdpBackend:
        monkeypatch.setattr(world, "PROBE", PROBE if shares else ".seen-by-nobody")
        while started:
            await started.pop().close()
        with monkeypatch.context() as patched:
            if apart:
                patched.setattr(world, "host_id", lambda: "the leader's")
            host = "127.0.0.2" if apart else "127.0.0.1"
            backend = FsdpBackend(second.followers(), Limits(rank_settle_s=1.0), host=host)
            started.append(backend)
            await backend.start(spec(path, **changes))
        assert backend._core is not None
        assert backend._core.world.elsewhere == ((1,) if apart else ())
        return backend

    yield begun
    for backend in started:
        await backend.close()


@pytest.mark.parametrize(
    "changes",
    [{}, {"dtype": "bfloat16"}, {"adapter": ADAPTER}, {"adapter": THIN}],
    ids=["whole", "bfloat16", "adapter", "adapter without rows on one rank"],
)
async def test_a_copy_over_two_machines_trains_publishes_and_saves_the_bits_of_one_machine(
    begin: Begin, tmp_path: Path, changes: dict[str, Any]
) -> None:
    found: list[tuple[Any, ...]] = []
    here_bytes: list[int] = []
    for apart, shares in ((False, False), (True, False), (True, True)):
        ranks, here = await begin(apart=apart, shares=shares, **changes), tmp_path / f"{apart}-{shares}"
        here_bytes.append(ranks.stored_bytes().segment)
        norms = await train(ranks, 1, 2)
        published = await version(ranks, here)
        await ranks.save(here / "saved")
        await ranks.export_checkpoint(here / "exported")
        norms += await train(ranks, 3)
        await ranks.load(here / "saved")
        assert await version(ranks, here) == published
        norms += await train(ranks, 3)
        files = {file.name: file.read_bytes() for file in (here / "exported").iterdir()}
        found.append((norms, published, held_in(here / "saved"), files))
    assert len(found[1][2]) == 2, "a file of each rank"
    assert here_bytes[0] > here_bytes[1] == here_bytes[2] > here_bytes[0] // 3, "room for this machine's rows is enough"
    for one, other, sharing in zip(*found, strict=True):
        assert one == other == sharing


@pytest.mark.long
async def test_tokens_travel_between_machines_to_experts_that_stay(begin: Begin, tmp_path: Path) -> None:
    make_model("qwen3_moe", {**FAMILIES["qwen3_moe"], "vocab_size": 100}, tmp_path / "moe")
    found: list[tuple[Any, ...]] = []
    for apart in (False, True):
        kept: dict[str, Any] = {"path": tmp_path / "moe", "expert_parallel": True, "dtype": "bfloat16"}
        ranks, here = await begin(apart=apart, **kept), tmp_path / str(apart)
        norms = await train(ranks, 1, 2)
        await ranks.save(here / "saved")
        found.append((norms, await version(ranks, here), held_in(here / "saved")))
    assert found[0] == found[1]


async def test_a_copy_over_two_machines_goes_on_from_a_checkpoint_of_one_and_of_the_torch_backend_and_they_from_its_own(
    begin: Begin, model_path: Path, tmp_path: Path
) -> None:
    critic = CriticSpec(model_path=model_path, learning_rate=1e-3, warmup_steps=1)
    alone = await whole(model_path, critic=critic)
    await train(alone, 1, 2)
    await alone.save(tmp_path / "flat")
    apart = await begin(apart=True, critic=critic)
    await apart.load(tmp_path / "flat")
    assert await version(apart, tmp_path, "ours") == await version(alone, tmp_path, "theirs")
    await train(apart, 3)
    await apart.save(tmp_path / "apart")
    said, norms = await values(apart), await train(apart, 4)
    near = await begin(apart=False, critic=critic)
    await near.load(tmp_path / "apart")
    np.testing.assert_array_equal(await values(near), said)
    assert await train(near, 4) == norms
    await near.load(tmp_path / "apart")
    await near.save(tmp_path / "near")
    assert held_in(tmp_path / "near") == held_in(tmp_path / "apart")
    apart = await begin(apart=True, critic=critic)
    await apart.load(tmp_path / "near")
    np.testing.assert_array_equal(await values(apart), said)
    assert await train(apart, 4) == norms


async def test_ranks_that_share_a_file_system_write_checkpoints_themselves_and_an_older_copy_is_not_taken_for_one(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    save = parts.save
    monkeypatch.setattr(parts, "save", lambda path, pieces, rank: (written.append(rank), save(path, pieces, rank)))
    saved = tmp_path / "saved"
    await (await begin(apart=True, shares=True)).save(saved)
    assert written == [0], "rank 1 has written its own"
    assert [file.name for file in saved.iterdir() if not file.name.startswith("shard-")] == ["backend.json"]
    (saved / PROBE).write_text("7")  # as a copy of the directory that was made meanwhile would have it
    await (await begin(apart=True, shares=False)).save(saved)
    assert written == [0, 0, 1]


async def test_a_micro_batch_gathers_the_weights_twice_and_sums_the_gradients_once_whether_it_recomputes_or_not(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upon this the arithmetic of ``supervisors/jobs/rank_traffic.py`` rests."""
    counted = {"foreach_all_gather": 0, "foreach_reduce": 0}

    def count(name: str) -> None:
        original = getattr(parameter_group, name)

        def counting(*arguments: Any, **named: Any) -> Any:
            counted[name] += 1
            return original(*arguments, **named)

        monkeypatch.setattr(parameter_group, name, counting)

    for name in counted:
        count(name)
    [batch] = cut(samples(), budget_tokens=1000, keep_zero=False)
    for recomputes in (False, True):
        ranks = await begin(apart=True, recompute="whole" if recomputes else "none")
        counted.update(dict.fromkeys(counted, 0))
        await ranks.accumulate(batch, LOSS)
        groups = counted["foreach_reduce"]
        assert groups > 1 and counted["foreach_all_gather"] == 2 * groups


async def test_a_damaged_checkpoint_is_refused_in_a_sentence_though_a_rank_elsewhere_waits_for_its_rows(
    begin: Begin, tmp_path: Path
) -> None:
    ranks = await begin(apart=True)
    await ranks.save(tmp_path / "saved")
    (tmp_path / "saved" / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointCorrupt, match="a rank's file is missing"):
        await ranks.load(tmp_path / "saved")


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("replicas", "elsewhere"), [(1, (1, 2, 3)), (2, (1,))])
async def test_copies_of_four_ranks_on_several_machines_publish_what_they_have_read_and_save_it_again(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: int, elsewhere: tuple[int, ...]
) -> None:
    alone = await whole(model_path)
    await train(alone, 1, 2)
    await alone.save(tmp_path / "flat")
    published = await version(alone, tmp_path, "flat-version")
    norms = await train(alone, 3)
    monkeypatch.setattr(world, "host_id", lambda: "the leader's")
    monkeypatch.setattr(world, "PROBE", ".seen-by-nobody")
    processes = RankProcesses("fsdp", 4)
    ranks = FsdpBackend(processes.followers(), replicas=replicas, host="127.0.0.2")
    try:
        await ranks.start(spec(model_path))
        assert ranks._core is not None and ranks._core.world.elsewhere == elsewhere
        await ranks.load(tmp_path / "flat")
        assert await version(ranks, tmp_path) == published
        await ranks.save(tmp_path / "saved")
        assert len(held_in(tmp_path / "saved")) == 4 // replicas
        assert await train(ranks, 3) == pytest.approx(norms, rel=1e-5)
        await ranks.load(tmp_path / "saved")
        assert await version(ranks, tmp_path) == published
        await alone.load(tmp_path / "saved")
        assert await version(alone, tmp_path, "again") == published
    finally:
        await ranks.close()
        processes.close()
