"""Ranks that train together: the same as one process, whatever their number, and the same bits again."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from actors.models.adapter import AdapterSpec
from actors.ranks.errors import RankLost
from actors.ranks.followers import NOBODY
from actors.trainer.backend import BackendSpec, CriticSpec, LossSpec, TrainBackend
from actors.trainer.backends.fsdp import fsdp_backend
from actors.trainer.backends.fsdp.fsdp_backend import FsdpBackend
from actors.trainer.backends.fsdp.orders import encode
from actors.trainer.backends.remote_errors import failed
from actors.trainer.backends.torch.torch_backend import TorchBackend
from actors.trainer.errors import BadMicroBatch, CheckpointCorrupt, MicroBatchTooLarge, ModelNotLoadable
from actors.trainer.learning.samples import TrainSample, cut
from actors.trainer.measured_size import made_up
from configs.limits import Limits
from tests.actors.trainer.backends.test_critic import reward_model
from tests.actors.trainer.random_samples import random_sample
from tests.rank_processes import RankProcesses
from tests.tiny_checkpoint import make_tiny_checkpoint

LOSS = LossSpec()
ADAPTER = AdapterSpec(rank=4, alpha=8.0)
THIN = AdapterSpec(rank=1, alpha=2.0, targets=("q_proj", "1.mlp.up_proj"))
"""Of whose matrices A one of two ranks has no row."""
CLOSE = 1e-5
WEIGHTS_CLOSE = 2e-5
"""Adam makes steps of sums that are nothing but rounding, such as those of the biases of keys."""
Begin = Callable[..., Awaitable[FsdpBackend]]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def second() -> Iterator[RankProcesses]:
    """The process of rank 1 of all worlds of two."""
    processes = RankProcesses("fsdp", 2)
    yield processes
    processes.close()


@pytest.fixture
async def begin(model_path: Path, second: RankProcesses) -> AsyncIterator[Begin]:
    """Starts a backend of one rank or two. What is begun anew with another number ends what was there."""
    started: list[FsdpBackend] = []

    async def begun(ranks: int, *, replicas: int = 1, path: Path = model_path, **changes: Any) -> FsdpBackend:
        while started:
            await started.pop().close()
        backend = FsdpBackend(second.followers() if ranks == 2 else NOBODY, replicas=replicas)
        started.append(backend)
        await backend.start(spec(path, **changes))
        return backend

    yield begun
    for backend in started:
        await backend.close()


def spec(path: Path, **changes: Any) -> BackendSpec:
    fixed: dict[str, Any] = {"learning_rate": 1e-3, "weight_decay": 0.1, "warmup_steps": 1}
    return BackendSpec(model_path=path, **(fixed | changes))


async def whole(path: Path, **changes: Any) -> TorchBackend:
    """The backend that ranks are measured by."""
    backend = TorchBackend()
    await backend.start(spec(path, **changes))
    return backend


def samples(seed: int = 0, count: int = 9) -> list[TrainSample]:
    """As a job with a critic has them; without one nobody looks at what it has said."""
    rng, judge = np.random.default_rng(seed), np.random.default_rng(seed + 1000)
    prompts = [rng.integers(3, 99, int(rng.integers(1, 6))).astype(np.int32) for _ in range(count)]
    plain = [random_sample(rng, n // 3, n % 3, prompts[n // 3], int(rng.integers(1, 8))) for n in range(count)]
    values = [judge.normal(size=(2, sample.tokens.size)).astype(np.float32) for sample in plain]
    return [dataclasses.replace(s, old_values=v[0], returns=v[1]) for s, v in zip(plain, values, strict=True)]


async def train(backend: TrainBackend, *seeds: int, count: int = 9) -> list[float]:
    """A step for each seed; the gradients' norms, with a critic's."""
    norms: list[float] = []
    for seed in seeds:
        for batch in cut(samples(seed, count), budget_tokens=60, keep_zero=False):
            await backend.accumulate(batch, LOSS)
        result = await backend.step(weight=10.0)
        norms += [result.grad_norm] if result.critic_grad_norm is None else [result.grad_norm, result.critic_grad_norm]
    return norms


async def values(backend: TrainBackend) -> np.ndarray:
    """What the critic says of some tokens."""
    [batch] = cut(samples(8), budget_tokens=1000, keep_zero=False)
    return await backend.values(batch)


async def version(backend: TrainBackend, directory: Path, name: str = "v") -> bytes:
    """The bytes that are published."""
    directory.mkdir(parents=True, exist_ok=True)
    await backend.export_segment(directory / name, job="j", policy_version=1, chunk_bytes=1000)
    return (directory / name).read_bytes()


def floats(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.float32)


# ------------------------------------------------------------ the same as one process


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ({}, {}),
        ({}, {"recompute": "whole", "lr_schedule": "cosine", "total_steps": 5}),
        ({"architecture": "llama", "tied": False, "heads": 1, "kv_heads": 1}, {"replicas": 2}),
        ({"architecture": "gpt2", "hidden": 36}, {"max_grad_norm": 0.1}),
        ({"architecture": "gemma2"}, {"needs_reference": True}),
        ({}, {"adapter": AdapterSpec(rank=3, alpha=6.0, targets=("all-linear", "lm_head"))}),
        ({}, {"adapter": THIN, "recompute": "whole", "replicas": 2}),
    ],
)
async def test_two_ranks_train_what_one_process_trains(
    begin: Begin, tmp_path: Path, model: dict[str, Any], changes: dict[str, Any]
) -> None:
    """Also where a part of the heads, or an odd number of rows, does not divide by the ranks; capped logits too."""
    path = make_tiny_checkpoint(tmp_path / "model", **model)
    ranks = await begin(2, path=path, **changes)
    alone = await whole(path, **{key: value for key, value in changes.items() if key != "replicas"})
    for batch in cut(samples(7), budget_tokens=60, keep_zero=False):
        ours, theirs = [await one.score(batch, temperature=0.7, reference=False) for one in (ranks, alone)]
        np.testing.assert_allclose(ours, theirs, atol=CLOSE)
    np.testing.assert_allclose(await train(ranks, 1, 2, 3), await train(alone, 1, 2, 3), rtol=CLOSE)
    weights, expected = await version(ranks, tmp_path / "a"), await version(alone, tmp_path / "b")
    np.testing.assert_allclose(floats(weights), floats(expected), atol=WEIGHTS_CLOSE)


async def test_ranks_measure_each_way_of_recomputation_and_train_alike_in_all(begin: Begin) -> None:
    """Also with an adapter, whose frozen model is sharded too."""
    ranks = await begin(2, recompute="auto", adapter=ADAPTER, learning_rate=0.0, weight_decay=0.0)
    norms: list[list[float]] = []
    for way in ("whole", "selective", "none"):
        await ranks.use_recompute(way)
        use = await ranks.measure(made_up(4, 32), LOSS)
        assert use.seconds > 0 and use.free_bytes > 0
        norms.append(await train(ranks, 1))
    assert norms[0] == norms[1] == norms[2]


async def test_a_rank_that_has_no_part_of_a_micro_batch_changes_nothing(
    begin: Begin, model_path: Path, tmp_path: Path
) -> None:
    ranks, alone = await begin(2), await whole(model_path)
    assert (await train(ranks, 4, count=1)) == pytest.approx(await train(alone, 4, count=1), rel=CLOSE)
    np.testing.assert_allclose(
        floats(await version(ranks, tmp_path / "a")), floats(await version(alone, tmp_path / "b")), atol=WEIGHTS_CLOSE
    )


@pytest.mark.parametrize("adapter", [None, ADAPTER, THIN])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_what_ranks_publish_and_export_is_what_one_process_would_byte_for_byte(
    begin: Begin, model_path: Path, tmp_path: Path, dtype: str, adapter: AdapterSpec | None
) -> None:
    alone = await whole(model_path, dtype=dtype, adapter=adapter)
    await train(alone, 1)
    await alone.save(tmp_path / "saved")
    ranks = await begin(2, dtype=dtype, adapter=adapter)
    await ranks.load(tmp_path / "saved")
    assert await version(ranks, tmp_path, "ours") == await version(alone, tmp_path, "theirs")
    manifests = [
        await one.export_segment(tmp_path / "again", job="j", policy_version=2, chunk_bytes=512)
        for one in (ranks, alone)
    ]
    assert manifests[0] == manifests[1]
    for name, one in (("a", ranks), ("b", alone)):
        await one.export_checkpoint(tmp_path / name)
    ours, theirs = ({f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in ("a", "b"))
    assert ours == theirs


async def test_nothing_of_an_older_segment_stays_between_tensors(begin: Begin, tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path / "model", architecture="gpt2", hidden=36)
    ranks = await begin(2, path=path)
    first = await version(ranks, tmp_path)
    (tmp_path / "w.partial").write_bytes(b"\xff" * len(first))
    assert await version(ranks, tmp_path, "w") == first


@pytest.mark.gpu
@pytest.mark.parametrize("adapter", [None, ADAPTER])
@pytest.mark.parametrize("offload", [False, True])
async def test_a_rank_on_a_device_trains_what_the_torch_backend_trains_there_and_saves_it(
    model_path: Path, tmp_path: Path, offload: bool, adapter: AdapterSpec | None
) -> None:
    trained: dict[str, Any] = {"device": "cuda", "adapter": adapter, "critic": CriticSpec(model_path=model_path)}
    rank, alone = FsdpBackend(offload=offload), await whole(model_path, **trained)
    await rank.start(spec(model_path, **trained))
    try:
        np.testing.assert_allclose(await train(rank, 1, 2, 3), await train(alone, 1, 2, 3), rtol=1e-4)
        await rank.save(tmp_path / "saved")
        expected = await version(rank, tmp_path)
        await train(rank, 4)
        await rank.load(tmp_path / "saved")
        assert await version(rank, tmp_path) == expected
    finally:
        await rank.close()


@pytest.mark.parametrize(
    ("changes", "warmup", "is_reward_model"),
    [
        ({}, 0, False),
        ({"recompute": "whole", "adapter": ADAPTER, "needs_reference": True}, 1, True),
        ({"replicas": 2}, 1, False),
    ],
)
async def test_two_ranks_train_the_critic_that_one_process_trains(
    begin: Begin, model_path: Path, tmp_path: Path, changes: dict[str, Any], warmup: int, is_reward_model: bool
) -> None:
    """Also one whose only row of the head is another rank's, and with a rank that has no part of a micro-batch."""
    path = reward_model(tmp_path / "reward") if is_reward_model else model_path
    critic = CriticSpec(model_path=path, learning_rate=1e-3, warmup_steps=warmup)
    ranks = await begin(2, critic=critic, **changes)
    alone = await whole(model_path, critic=critic, **{k: v for k, v in changes.items() if k != "replicas"})
    np.testing.assert_allclose(await values(ranks), await values(alone), atol=CLOSE)
    [batch] = cut(samples(1), budget_tokens=1000, keep_zero=False)
    ours, theirs = [await one.accumulate(batch, LOSS) for one in (ranks, alone)]
    for field in dataclasses.fields(ours):
        assert getattr(ours, field.name) == pytest.approx(getattr(theirs, field.name), rel=1e-4, abs=CLOSE), field.name
    for count in (9, 1):
        norms = await train(ranks, 2, 3, count=count)
        assert len(norms) == 4 and min(norms[1::2]) > 0
        np.testing.assert_allclose(norms, await train(alone, 2, 3, count=count), rtol=1e-4)
    np.testing.assert_allclose(await values(ranks), await values(alone), atol=2e-4)
    weights, expected = await version(ranks, tmp_path / "a"), await version(alone, tmp_path / "b")
    np.testing.assert_allclose(floats(weights), floats(expected), atol=WEIGHTS_CLOSE)


# ------------------------------------------------------------ the same again


@pytest.mark.parametrize(
    "changes", [{}, {"dtype": "bfloat16", "recompute": "whole"}, {"replicas": 2}, {"adapter": ADAPTER}]
)
async def test_as_many_ranks_give_the_same_bits_again(begin: Begin, tmp_path: Path, changes: dict[str, Any]) -> None:
    versions: list[bytes] = []
    for _ in range(2):
        ranks = await begin(2, **changes)
        await train(ranks, 1, 2)
        versions.append(await version(ranks, tmp_path))
    assert versions[0] == versions[1]


@pytest.mark.parametrize(("dtype", "close"), [("float32", CLOSE), ("bfloat16", 0.01)])
async def test_as_many_ranks_give_a_critic_the_same_bits_again(
    begin: Begin, model_path: Path, dtype: str, close: float
) -> None:
    alone = await whole(model_path, dtype=dtype, critic=CriticSpec(model_path=model_path))
    found: list[np.ndarray] = []
    for _ in range(2):
        ranks = await begin(2, dtype=dtype, critic=CriticSpec(model_path=model_path))
        np.testing.assert_allclose(await values(ranks), await values(alone), atol=close)
        await train(ranks, 1, 2)
        found.append(await values(ranks))
    np.testing.assert_array_equal(found[0], found[1])


async def test_bfloat16_steps_that_are_too_small_for_a_weight_add_up_in_the_master(
    begin: Begin, tmp_path: Path
) -> None:
    ranks = await begin(2, dtype="bfloat16", learning_rate=1e-5, weight_decay=0.0)
    before = np.frombuffer(await version(ranks, tmp_path), np.uint16)
    await train(ranks, *[1] * 2)
    moved = [(before != np.frombuffer(await version(ranks, tmp_path), np.uint16)).sum()]
    await train(ranks, *[1] * 20)
    moved.append((before != np.frombuffer(await version(ranks, tmp_path), np.uint16)).sum())
    assert moved[0] < moved[1] / 3


# ------------------------------------------------------------ checkpoints


def state_in(directory: Path) -> dict[str, torch.Tensor]:
    """Whole tensors, from the files of all ranks in order."""
    files = [load_file(file) for file in sorted(directory.glob("shard-*"))]
    return {name: torch.cat([file[name] for file in files if name in file]) for name in files[0]}


async def test_two_ranks_go_on_from_what_two_have_saved_bit_for_bit(begin: Begin, tmp_path: Path) -> None:
    ranks = await begin(2)
    await train(ranks, 1, 2)
    await ranks.save(tmp_path / "saved")
    norms = await train(ranks, 3, 4)
    expected = await version(ranks, tmp_path)
    ranks = await begin(2)
    await ranks.load(tmp_path / "saved")
    assert await train(ranks, 3, 4) == norms
    assert await version(ranks, tmp_path) == expected


@pytest.mark.parametrize(("before", "after", "replicas"), [(2, 1, 1), (1, 2, 1), (1, 2, 2)])
async def test_another_number_of_ranks_goes_on_from_the_same_weights_and_moments(
    begin: Begin, tmp_path: Path, before: int, after: int, replicas: int
) -> None:
    one = await begin(before)
    await train(one, 1, 2)
    await one.save(tmp_path / "saved")
    saved = await version(one, tmp_path)
    norms = await train(one, 3)
    other = await begin(after, replicas=replicas)
    await train(other, 5)
    await other.load(tmp_path / "saved")
    assert await version(other, tmp_path) == saved
    await other.save(tmp_path / "again")
    expected, found = state_in(tmp_path / "saved"), state_in(tmp_path / "again")
    assert len(list((tmp_path / "again").glob("shard-*"))) == after // replicas
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert await train(other, 3) == pytest.approx(norms, rel=CLOSE)


async def test_ranks_go_on_from_a_checkpoint_of_the_torch_backend(
    begin: Begin, model_path: Path, tmp_path: Path
) -> None:
    alone = await whole(model_path)
    await train(alone, 1, 2)
    await alone.save(tmp_path / "saved")
    ranks = await begin(2)
    await ranks.load(tmp_path / "saved")
    assert await version(ranks, tmp_path, "ours") == await version(alone, tmp_path, "theirs")
    assert await train(ranks, 3, 4) == pytest.approx(await train(alone, 3, 4), rel=CLOSE)
    ours, theirs = await version(ranks, tmp_path), await version(alone, tmp_path)
    np.testing.assert_allclose(floats(ours), floats(theirs), atol=WEIGHTS_CLOSE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_the_torch_backend_goes_on_from_a_checkpoint_of_ranks(
    begin: Begin, model_path: Path, tmp_path: Path, dtype: str
) -> None:
    ranks = await begin(2, dtype=dtype)
    await train(ranks, 1, 2)
    await ranks.save(tmp_path / "saved")
    alone = await whole(model_path, dtype=dtype)
    await train(alone, 5)
    await alone.load(tmp_path / "saved")
    assert await version(ranks, tmp_path, "ours") == await version(alone, tmp_path, "theirs")
    await alone.save(tmp_path / "flat")
    again = await begin(2, dtype=dtype)
    await again.load(tmp_path / "flat")
    await again.save(tmp_path / "again")
    expected, found = state_in(tmp_path / "saved"), state_in(tmp_path / "again")
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    if dtype == "float32":
        assert await train(alone, 3) == pytest.approx(await train(again, 3), rel=CLOSE)
    (tmp_path / "saved" / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointCorrupt, match="a rank's file is missing"):
        await alone.load(tmp_path / "saved")


async def test_an_adapter_goes_on_with_one_process_two_ranks_and_one_and_is_no_others(
    begin: Begin, model_path: Path, tmp_path: Path
) -> None:
    alone = await whole(model_path, adapter=ADAPTER)
    await train(alone, 1, 2)
    await alone.save(tmp_path / "flat")
    ranks = await begin(2, adapter=ADAPTER)
    await ranks.load(tmp_path / "flat")
    assert await version(ranks, tmp_path, "ours") == await version(alone, tmp_path, "theirs")
    assert await train(ranks, 3) == pytest.approx(await train(alone, 3), rel=CLOSE)
    await ranks.save(tmp_path / "saved")
    saved, norms = await version(ranks, tmp_path), await train(ranks, 4)
    await alone.load(tmp_path / "saved")
    one = await begin(1, adapter=ADAPTER)
    await one.load(tmp_path / "saved")
    for other in (alone, one):
        assert await version(other, tmp_path) == saved
        assert await train(other, 4) == pytest.approx(norms, rel=CLOSE)
    thin, none, elsewhere = "an adapter of rank 1", "the job trains a whole model", "whose files are others"
    strange = make_tiny_checkpoint(tmp_path / "strange", seed=1)
    for path, adapter, said in ((model_path, THIN, thin), (model_path, None, none), (strange, ADAPTER, elsewhere)):
        other = await begin(1, path=path, adapter=adapter)
        for checkpoint in ("flat", "saved"):
            with pytest.raises(CheckpointCorrupt, match=said):
                await other.load(tmp_path / checkpoint)


async def test_a_critic_goes_on_with_one_process_two_ranks_and_one(
    begin: Begin, model_path: Path, tmp_path: Path
) -> None:
    """After a warm-up, so that its optimizer has taken more steps than the policy's."""
    critic = CriticSpec(model_path=model_path, learning_rate=1e-3, warmup_steps=1)
    alone = await whole(model_path, critic=critic)
    await train(alone, 1, 2)
    await alone.save(tmp_path / "flat")
    ranks = await begin(2, critic=critic)
    await train(ranks, 6)
    await ranks.load(tmp_path / "flat")
    np.testing.assert_allclose(await values(ranks), await values(alone), atol=CLOSE)
    assert await train(ranks, 3, 7) == pytest.approx(await train(alone, 3, 7), rel=1e-4)
    await ranks.save(tmp_path / "saved")
    saved = await values(ranks)
    norms = await train(ranks, 4, 5)
    again = await begin(2, critic=critic)
    await again.load(tmp_path / "saved")
    np.testing.assert_array_equal(await values(again), saved)
    assert await train(again, 4, 5) == norms
    await alone.load(tmp_path / "saved")
    one = await begin(1, critic=critic)
    await one.load(tmp_path / "saved")
    for other in (alone, one):
        np.testing.assert_allclose(await values(other), saved, atol=CLOSE)
        assert await train(other, 4, 5) == pytest.approx(norms, rel=1e-4)
    none = await begin(1)
    await none.load(tmp_path / "saved")  # a job may go on without its critic, and not begin with one
    await none.save(tmp_path / "saved")
    for backend in (alone, await begin(2, critic=critic)):
        with pytest.raises(CheckpointCorrupt, match="holds no critic, and the job trains one"):
            await backend.load(tmp_path / "saved")


async def test_beside_an_adapter_the_reference_is_the_model_itself(begin: Begin, model_path: Path) -> None:
    alone = await whole(model_path)
    [batch] = cut(samples(7), budget_tokens=1000, keep_zero=False)
    first = await alone.score(batch, temperature=1.0, reference=False)
    ranks = await begin(2, adapter=ADAPTER, needs_reference=True, learning_rate=0.02)
    await train(ranks, 1, 2)
    np.testing.assert_allclose(await ranks.score(batch, temperature=1.0, reference=True), first, atol=CLOSE)
    assert not np.allclose(await ranks.score(batch, temperature=1.0, reference=False), first, atol=1e-3)


async def test_a_model_beside_an_adapter_is_sharded_in_its_own_dtype_and_gets_no_gradient(
    begin: Begin, model_path: Path
) -> None:
    rank = await begin(1, adapter=ADAPTER, dtype="bfloat16")
    for batch in cut(samples(1), budget_tokens=60, keep_zero=False):
        await rank.accumulate(batch, LOSS)
    core = rank._core
    assert core is not None
    for name, own in core.policy.model.named_parameters():
        is_adapter = ".lora_" in name
        assert isinstance(own, DTensor), name
        assert own.dtype == (torch.float32 if is_adapter else torch.bfloat16), name
        assert (own.grad is not None) == is_adapter, name


def remove_a_file(directory: Path) -> None:
    (directory / "shard-00002-model-00001-of-00001.safetensors").unlink()


def cut_a_file_short(directory: Path) -> None:
    file = directory / "shard-00001-model-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def damage_a_head(directory: Path) -> None:
    file = directory / "shard-00001-model-00001-of-00001.safetensors"
    file.write_bytes(b"\xff" * 100 + file.read_bytes()[100:])


def empty_it(directory: Path) -> None:
    for file in directory.glob("shard-*"):
        file.unlink()


def write_words(directory: Path) -> None:
    (directory / "backend.json").write_text('{"kind": "fsdp", "steps": "many"}')


def call_it_simulated(directory: Path) -> None:
    (directory / "backend.json").write_text('{"kind": "simulated", "steps": 3}')


def call_it_torch(directory: Path) -> None:
    (directory / "backend.json").write_text('{"kind": "torch", "steps": 3}')


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (remove_a_file, "a rank's file is missing"),
        (cut_a_file_short, "resume from another checkpoint"),
        (damage_a_head, "resume from another checkpoint"),
        (empty_it, "holds no master"),
        (write_words, r"backend\.json"),
        (call_it_simulated, "'simulated', and fsdp reads that of fsdp and torch"),
        (call_it_torch, r"weights\.safetensors"),
    ],
)
async def test_a_damaged_checkpoint_is_refused_in_a_sentence(
    begin: Begin, tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    ranks = await begin(2)
    await ranks.save(tmp_path / "saved")
    damage(tmp_path / "saved")
    with pytest.raises(CheckpointCorrupt, match=said):
        await ranks.load(tmp_path / "saved")


async def test_a_checkpoint_of_another_model_is_refused(begin: Begin, model_path: Path, tmp_path: Path) -> None:
    wide = make_tiny_checkpoint(tmp_path / "w", hidden=40)
    deep = make_tiny_checkpoint(tmp_path / "d", layers=3)
    for path in (wide, deep):
        other = await begin(2, path=path)
        await other.save(tmp_path / path.name / "saved")
    other = await whole(wide)
    await other.save(tmp_path / "flat")
    for saved in (wide / "saved", tmp_path / "flat"):
        with pytest.raises(CheckpointCorrupt, match="another model"):
            await (await begin(2)).load(saved)
    ranks = await begin(2, path=deep)
    await ranks.save(tmp_path / "saved")
    shallow = make_tiny_checkpoint(tmp_path / "s", layers=2)
    with pytest.raises(CheckpointCorrupt, match="another model"):
        await (await begin(2, path=shallow)).load(tmp_path / "saved")


# ------------------------------------------------------------ what goes wrong


async def test_no_critic_is_the_same_error_as_in_one_process(begin: Begin, tmp_path: Path) -> None:
    with pytest.raises(ModelNotLoadable, match=r"critic\.path: .*nowhere"):
        await begin(2, critic=CriticSpec(model_path=tmp_path / "nowhere"))


async def test_a_micro_batch_that_says_nothing_of_values_is_refused_before_any_rank_begins(
    begin: Begin, model_path: Path
) -> None:
    ranks = await begin(2, critic=CriticSpec(model_path=model_path))
    [batch] = cut(samples(1, count=1), budget_tokens=1000, keep_zero=False)
    with pytest.raises(BadMicroBatch, match="old_values, returns: missing"):
        await ranks.accumulate(dataclasses.replace(batch, returns=None), LOSS)
    assert await train(ranks, 1)


async def test_no_model_is_the_same_error_as_in_one_process_and_the_ranks_live_on(begin: Begin, tmp_path: Path) -> None:
    with pytest.raises(ModelNotLoadable, match=r"model\.path: .*nowhere is not a directory"):
        await begin(2, path=tmp_path / "nowhere")
    assert await train(await begin(2), 1)


async def test_what_one_rank_fails_by_is_said_although_another_waits_for_it(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader waits too; not within torch, which would number the groups of later tests otherwise than others do."""
    said = threading.Event()
    monkeypatch.setattr(fsdp_backend, "FsdpCore", lambda *_: said.wait(30.0))

    class Two:
        """Rank 1 says nothing, and rank 2 fails."""

        count = 2

        async def call(
            self, orders: Sequence[bytes], *, timeout_s: float, ends: Callable[[bytes], bool] | None = None
        ) -> list[bytes]:
            answer = encode(failed(ModelNotLoadable("no such model")))
            if ends is None or not ends(answer):
                await asyncio.sleep(timeout_s)
            return [answer]

        async def close(self) -> None:
            pass

    ranks = FsdpBackend(Two(), Limits(train_step_timeout_s=1.0))
    with pytest.raises(ModelNotLoadable, match="no such model"):
        await ranks.start(spec(model_path))
    said.set()
    await ranks.close()


TORCH_SAYS = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:51224")
MUTE = 0.02
"""Seconds for which the others are waited for, here."""


@pytest.mark.parametrize(
    ("own", "theirs", "told", "words"),
    [
        (TORCH_SAYS, None, RankLost, "or it has failed: .gloo[^;]*$"),
        (dist.DistBackendError("NCCL: remote process exited"), None, RankLost, "or it has failed: NCCL"),
        (TORCH_SAYS, TORCH_SAYS, RankLost, "or it has failed: .gloo[^;]*$"),
        (None, TORCH_SAYS, RankLost, "or it has failed: .gloo[^;]*$"),
        (TORCH_SAYS, RuntimeError("no gradient"), RankLost, "or it has failed: .gloo.*; no gradient$"),
        (TORCH_SAYS, ModelNotLoadable("no such model"), ModelNotLoadable, "no such model"),
        (ModelNotLoadable("no such model"), TORCH_SAYS, ModelNotLoadable, "no such model"),
        (MemoryError("all is full"), None, MemoryError, "all is full"),
    ],
)
async def test_what_torch_says_when_another_rank_is_gone_is_that_a_rank_is_lost(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, own: Exception | None, theirs: Exception | None,
    told: type[Exception], words: str,
) -> None:  # fmt: skip
    """However long the others say nothing, and whichever rank hears it. What a rank fails by itself is told."""
    ended = threading.Event()

    def core(*_: object) -> None:
        if own is None:
            ended.wait(30.0)
            return
        raise own

    monkeypatch.setattr(fsdp_backend, "FsdpCore", core)

    class One:
        count = 1

        async def call(self, orders: Sequence[bytes], *, timeout_s: float, ends: object = None) -> list[bytes]:
            if theirs is None:
                await asyncio.sleep(timeout_s)
                raise AssertionError
            return [encode(failed(theirs))]

        async def close(self) -> None:
            pass

    ranks = FsdpBackend(One(), Limits(rank_settle_s=MUTE))
    with pytest.raises(told, match=words):
        await ranks.start(spec(model_path))
    ended.set()
    await ranks.close()


async def test_what_goes_wrong_in_a_world_of_one_is_nobody_elses(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def core(*_: object) -> None:
        raise TORCH_SAYS

    monkeypatch.setattr(fsdp_backend, "FsdpCore", core)
    ranks = FsdpBackend()
    with pytest.raises(RuntimeError, match="Connection closed"):
        await ranks.start(spec(model_path))
    await ranks.close()


async def test_a_part_of_a_micro_batch_that_fits_into_no_message_names_the_key_to_lower(
    model_path: Path, second: RankProcesses
) -> None:
    (large,) = cut(samples(count=200), budget_tokens=100_000, keep_zero=False)
    ranks = FsdpBackend(second.followers(), Limits(message_max_bytes=4096))
    await ranks.start(spec(model_path))
    with pytest.raises(MicroBatchTooLarge, match=r"^trainer\.micro_batch_tokens: .* and 3072 fit .* Lower trainer"):
        await ranks.accumulate(large, LOSS)
    await ranks.close()


async def test_a_micro_batch_that_is_none_is_refused_before_any_rank_has_a_part(begin: Begin) -> None:
    ranks = await begin(2)
    (batch,) = cut(samples(), budget_tokens=10_000, keep_zero=False)
    batch.loss_weight[0, 0] = 1.0
    with pytest.raises(BadMicroBatch, match="position 0"):
        await ranks.accumulate(batch, LOSS)
    assert (await ranks.step(weight=1.0)).grad_norm == 0.0


async def test_ranks_of_one_machine_open_no_port_that_a_stranger_could_reach(
    begin: Begin, second: RankProcesses
) -> None:
    pids = (os.getpid(), second.processes[0].pid)
    before = ports_of(pids)  # this process may hold some of earlier tests, whose ranks were on several machines
    ranks = await begin(2)
    await train(ranks, 1)
    assert ports_of(pids) - before == set()


def ports_of(pids: Sequence[int]) -> set[tuple[str, int]]:
    return {(c.laddr.ip, c.laddr.port) for pid in pids for c in psutil.Process(pid).net_connections("tcp")}


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
async def test_a_rank_that_dies_or_falls_silent_is_lost_and_the_next_call_says_so(model_path: Path, how: int) -> None:
    processes = RankProcesses("fsdp", 2)
    ranks = FsdpBackend(processes.followers(), Limits(train_step_timeout_s=20.0))
    try:
        await ranks.start(spec(model_path))
        await train(ranks, 1)
        processes.processes[0].send_signal(how)
        with pytest.raises(RankLost):
            await train(ranks, 2)
    finally:
        with contextlib.suppress(RankLost):
            await ranks.close()
        processes.close()


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_four_ranks_shard_and_replicate_and_go_on_from_two(
    begin: Begin, model_path: Path, tmp_path: Path
) -> None:
    two = await begin(2)
    await train(two, 1, 2)
    await two.save(tmp_path / "saved")
    saved = await version(two, tmp_path)
    norms = await train(two, 3)
    await two.close()
    processes = RankProcesses("fsdp", 4)
    try:
        for replicas in (1, 2, 4):
            four = FsdpBackend(processes.followers(), replicas=replicas)
            await four.start(spec(model_path))
            await four.load(tmp_path / "saved")
            assert await version(four, tmp_path) == saved
            assert await train(four, 3) == pytest.approx(norms, rel=CLOSE)
            shutil.rmtree(tmp_path / "again", ignore_errors=True)
            await four.save(tmp_path / "again")
            assert len(list((tmp_path / "again").glob("shard-*"))) == 4 // replicas
            await four.close()
    finally:
        processes.close()
