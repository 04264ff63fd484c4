"""What every train backend promises (``actors/trainer/backend.py``), asserted for all kinds; torch on CPU and CUDA.

A training service is a kind of its own, over each of the others: jobs that share one, asked over a transport. Kinds
with ``-adapter`` train an adapter of the policy; ``fsdp:2`` is a world of two ranks, in two processes.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from actors.host.adapter import AdapterSpec
from actors.protocol.weights import Manifest
from actors.train_service.residency import remove_parked
from actors.trainer.backend import BackendSpec, CriticSpec, LossSpec, MicroBatch, TrainBackend
from actors.trainer.backends.fsdp.fsdp_backend import FsdpBackend
from actors.trainer.backends.simulated_backend import SimulatedBackend
from actors.trainer.backends.torch.torch_backend import TorchBackend
from actors.trainer.batching import TrainSample, cut
from actors.trainer.errors import BackendClosed, CheckpointCorrupt
from actors.weights.manifest import check_manifest, chunk_bounds, chunk_is_intact, tensor_views
from tests.actors.train_service.service_world import ServiceWorld
from tests.rank_processes import RankProcesses
from tests.tiny_checkpoint import make_tiny_checkpoint

KINDS: dict[str, type[TrainBackend]] = {"fsdp": FsdpBackend, "torch": TorchBackend, "simulated": SimulatedBackend}
LOSS = LossSpec()
ADAPTER = AdapterSpec(rank=4, alpha=8.0)
QUEUE = {"gap_s": 0.01}
"""A test's jobs take turns within one coroutine: none of them has anything to do while the other has."""
WORLDS = [
    *sorted(KINDS),
    "torch-adapter",
    "service:torch",
    "service:torch-adapter",
    "service:simulated",
    "fsdp:2",
    "fsdp:2-adapter",
    pytest.param("fsdp:4", marks=pytest.mark.long),
    *(
        pytest.param(world, marks=pytest.mark.gpu)
        for world in ("torch-cuda", "torch-adapter-cuda", "fsdp-cuda", "fsdp-adapter-cuda")
    ),
]
Start = Callable[..., Awaitable[TrainBackend]]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], RankProcesses]]:
    """The processes of a world of that many ranks, started once."""
    worlds: dict[int, RankProcesses] = {}

    def world_of(size: int) -> RankProcesses:
        if size not in worlds:
            worlds[size] = RankProcesses("fsdp", size)
        return worlds[size]

    yield world_of
    for world in worlds.values():
        world.close()


@pytest.fixture(params=WORLDS)
async def start(
    request: pytest.FixtureRequest,
    model_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    ranks: Callable[[int], RankProcesses],
) -> AsyncIterator[Start]:
    started: list[TrainBackend] = []
    name, _, variant = request.param.partition("-")
    device, adapter = "cuda" if "cuda" in variant else "cpu", ADAPTER if "adapter" in variant else None
    kind, shared = name.removeprefix("service:"), name.startswith("service:")
    kind, _, size = kind.partition(":")
    directory = tmp_path_factory.mktemp("service")
    world = ServiceWorld(
        directory, make=lambda kind: KINDS[kind](), backend=kind if shared else "simulated", jobs_max=8, queue=QUEUE
    )
    if shared:
        await world.start()

    async def begin(*, critic_warmup: int | None = None, **changes: object) -> TrainBackend:
        if shared:
            backend: TrainBackend = (await world.trainer(f"j{len(started)}")).backend
        else:
            backend = FsdpBackend(ranks(int(size)).followers()) if size else KINDS[kind]()
        critic = CriticSpec(model_path=model_path, learning_rate=0.02, warmup_steps=critic_warmup or 0)
        changes["critic"] = None if critic_warmup is None else critic
        fixed = {"model_path": model_path, "device": device, "learning_rate": 0.01, "adapter": adapter}
        spec = BackendSpec(**(fixed | changes))  # type: ignore[arg-type]
        await backend.start(spec)
        started.append(backend)
        return backend

    yield begin
    for backend in started:
        await backend.close()
    if shared:
        await world.stop()
        remove_parked(directory)


def samples(count: int = 8, seed: int = 0) -> list[TrainSample]:
    rng = np.random.default_rng(seed)
    made: list[TrainSample] = []
    for index in range(count):
        r = int(rng.integers(1, 9))
        made.append(
            TrainSample(
                prompt=index // 4,
                sibling=index % 4,
                prompt_ids=rng.integers(3, 99, 2 + index // 4).astype(np.int32),
                tokens=rng.integers(3, 99, r).astype(np.int32),
                logprobs=rng.normal(-4.6, 0.1, r).astype(np.float32),
                stale=np.zeros(r, np.bool_),
                advantage=float(rng.normal()),
            )
        )
    return made


def judged(plain: list[TrainSample], seed: int = 0) -> list[TrainSample]:
    """The same samples as a job with a critic has them."""
    rng = np.random.default_rng(seed)
    drawn = [[rng.normal(size=sample.tokens.size).astype(np.float32) for _ in range(3)] for sample in plain]
    return [
        dataclasses.replace(sample, advantage=advantage, old_values=old, returns=returns)
        for sample, (advantage, old, returns) in zip(plain, drawn, strict=True)
    ]


def whole(batch_of: list[TrainSample]) -> list[MicroBatch]:
    return cut(batch_of, budget_tokens=10_000, keep_zero=False)


async def weights_of(backend: TrainBackend, directory: Path) -> np.ndarray:
    """The exported bytes: all that a worker will ever see of the weights."""
    path = directory / "segment"
    await backend.export_segment(path, job="j", policy_version=0, chunk_bytes=1 << 20)
    return np.fromfile(path, dtype=np.float32)


async def train(backend: TrainBackend, batches: list[MicroBatch], weight: float = 10.0) -> None:
    for batch in batches:
        await backend.accumulate(batch, LOSS)
    await backend.step(weight=weight)


async def test_the_result_of_a_step_does_not_depend_on_how_the_batch_was_cut(start: Start, tmp_path: Path) -> None:
    one, two = await start(), await start()
    fine = cut(samples(), budget_tokens=12, keep_zero=False)
    assert len(fine) > 2
    await train(one, whole(samples()))
    await train(two, fine)
    np.testing.assert_allclose(await weights_of(one, tmp_path), await weights_of(two, tmp_path), atol=2e-5)


async def test_statistics_add_up_over_micro_batches(start: Start) -> None:
    backend = await start()
    parts = [await backend.accumulate(b, LOSS) for b in cut(samples(), budget_tokens=12, keep_zero=False)]
    (all_of_it,) = [await backend.accumulate(b, LOSS) for b in whole(samples())]
    assert sum(p.tokens for p in parts) == all_of_it.tokens == sum(s.tokens.size for s in samples())
    for name in ("weight", "loss_sum", "clipped_sum", "entropy_sum", "mismatch_sum"):
        assert sum(getattr(p, name) for p in parts) == pytest.approx(getattr(all_of_it, name), rel=1e-3, abs=1e-3)


async def test_only_step_changes_the_weights(start: Start, tmp_path: Path) -> None:
    backend = await start()
    before = await weights_of(backend, tmp_path)
    for batch in whole(samples()):
        await backend.score(batch, temperature=1.0, reference=False)
        await backend.accumulate(batch, LOSS)
    np.testing.assert_array_equal(await weights_of(backend, tmp_path), before)
    await backend.step(weight=1.0)
    assert (await weights_of(backend, tmp_path) != before).any()


async def test_step_divides_by_the_weight_and_clears_the_sums(start: Start) -> None:
    backend = await start(max_grad_norm=1e9)
    (batch,) = whole(samples())
    await backend.accumulate(batch, LOSS)
    one = await backend.step(weight=1.0)
    empty = await backend.step(weight=1.0)
    assert one.grad_norm > 0
    assert empty.grad_norm == 0.0
    other = await start(max_grad_norm=1e9)
    await other.accumulate(batch, LOSS)
    ten = await other.step(weight=10.0)
    assert ten.grad_norm == pytest.approx(one.grad_norm / 10, rel=1e-4)


async def test_save_then_load_restores_everything_bit_for_bit(start: Start, tmp_path: Path) -> None:
    """After loading, further steps give the same weights as without the interruption."""
    one = await start(warmup_steps=1, lr_schedule="cosine", total_steps=9)
    await train(one, whole(samples(seed=1)))
    await one.save(tmp_path / "saved")
    await train(one, whole(samples(seed=2)))
    two = await start(warmup_steps=1, lr_schedule="cosine", total_steps=9)
    await two.load(tmp_path / "saved")
    await train(two, whole(samples(seed=2)))
    np.testing.assert_array_equal(await weights_of(one, tmp_path), await weights_of(two, tmp_path))
    assert (await one.step(weight=1.0)).learning_rate == (await two.step(weight=1.0)).learning_rate


async def test_load_forgets_gradients_of_an_unfinished_batch(start: Start, tmp_path: Path) -> None:
    backend = await start()
    await backend.save(tmp_path / "saved")
    for batch in whole(samples()):
        await backend.accumulate(batch, LOSS)
    await backend.load(tmp_path / "saved")
    assert (await backend.step(weight=1.0)).grad_norm == 0.0


async def test_loading_from_nowhere_names_the_file(start: Start, tmp_path: Path) -> None:
    backend = await start()
    with pytest.raises(CheckpointCorrupt, match=r"backend\.json"):
        await backend.load(tmp_path / "nothing")


async def test_the_learning_rate_warms_up_linearly(start: Start) -> None:
    backend = await start(warmup_steps=4)
    rates = [(await backend.step(weight=1.0)).learning_rate for _ in range(6)]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])


async def test_an_exported_segment_is_what_its_manifest_says(start: Start, tmp_path: Path) -> None:
    backend = await start()
    path = tmp_path / "segment"
    manifest = await backend.export_segment(path, job="job-1", policy_version=7, chunk_bytes=512)
    assert isinstance(manifest, Manifest)
    check_manifest(manifest)
    data = path.read_bytes()
    assert (manifest.job, manifest.policy_version, manifest.total_bytes) == ("job-1", 7, len(data))
    assert len(manifest.chunk_hashes) == -(-len(data) // 512)
    for index in range(len(manifest.chunk_hashes)):
        start_byte, end_byte = chunk_bounds(manifest, index)
        assert chunk_is_intact(manifest, index, data[start_byte:end_byte])
    assert all(entry.offset_bytes % 64 == 0 for entry in manifest.tensors)
    assert set(tensor_views(manifest, data)) == {entry.name for entry in manifest.tensors}
    assert not list(tmp_path.glob("*.partial"))


async def test_scores_are_log_probabilities_of_response_tokens_and_zero_elsewhere(start: Start) -> None:
    backend = await start()
    (batch,) = whole(samples())
    scores = await backend.score(batch, temperature=1.0, reference=False)
    assert scores.shape == batch.input_ids.shape
    assert scores.dtype == np.float32
    where = batch.loss_weight != 0
    assert (scores[where] < 0).all()
    assert (scores[~where] == 0).all()


async def test_the_reference_model_stays_as_it_was(start: Start) -> None:
    backend = await start(needs_reference=True)
    (batch,) = whole(samples())
    before = await backend.score(batch, temperature=1.0, reference=True)
    for _ in range(3):
        await train(backend, [batch])
    np.testing.assert_array_equal(await backend.score(batch, temperature=1.0, reference=True), before)
    assert (await backend.score(batch, temperature=1.0, reference=False) != before).any()


async def test_without_a_reference_model_its_scores_are_refused(start: Start) -> None:
    backend = await start()
    with pytest.raises(BackendClosed, match="needs_reference"):
        await backend.score(whole(samples())[0], temperature=1.0, reference=True)


async def test_values_are_of_response_tokens_and_only_step_changes_them(start: Start) -> None:
    backend = await start(critic_warmup=0)
    (batch,) = whole(judged(samples()))
    before = await backend.values(batch)
    assert before.shape == batch.input_ids.shape
    assert before.dtype == np.float32
    await backend.accumulate(batch, LOSS)
    np.testing.assert_array_equal(await backend.values(batch), before)
    await backend.step(weight=10.0)
    after = await backend.values(batch)
    where = batch.loss_weight != 0
    assert (after != before)[where].any()
    assert (after[~where] == 0).all()


async def test_the_critic_learns_what_it_is_to_expect(start: Start) -> None:
    backend = await start(critic_warmup=0)
    (batch,) = whole(
        [dataclasses.replace(s, returns=np.full(s.tokens.size, 0.5, np.float32)) for s in judged(samples())]
    )
    found = (await backend.values(batch))[batch.loss_weight != 0]
    losses: list[float] = []
    for _ in range(40):
        stats = await backend.accumulate(batch, LOSS)
        losses.append(stats.value_loss_sum / stats.weight)
        norm = (await backend.step(weight=stats.weight)).critic_grad_norm
        assert norm is not None and norm > 0
    assert losses[0] == pytest.approx(float(0.5 * ((found - 0.5) ** 2).mean()), rel=1e-4)
    assert losses[-1] < 0.7 * losses[0]


async def test_while_the_critic_warms_up_the_policy_stays_as_it_is_and_then_begins_as_if_it_were_new(
    start: Start, tmp_path: Path
) -> None:
    warming, at_once = await start(critic_warmup=2), await start()
    before = await weights_of(warming, tmp_path)
    batches = whole(judged(samples(seed=1)))
    for _ in range(2):
        values = await warming.values(batches[0])
        stats = await warming.accumulate(batches[0], LOSS)
        result = await warming.step(weight=10.0)
        assert (result.grad_norm, result.learning_rate) == (0.0, 0.0)
        assert stats.entropy_sum > 0
        np.testing.assert_array_equal(await weights_of(warming, tmp_path), before)
        assert (await warming.values(batches[0]) != values).any()
    await train(warming, batches)
    await train(at_once, batches)
    np.testing.assert_array_equal(await weights_of(warming, tmp_path), await weights_of(at_once, tmp_path))


@pytest.mark.parametrize("taken", [1, 3])
async def test_save_and_load_hold_the_critic_too_within_its_warm_up_and_after_it(
    start: Start, tmp_path: Path, taken: int
) -> None:
    one = await start(critic_warmup=2)
    for seed in range(taken):
        await train(one, whole(judged(samples(seed=seed))))
    await one.save(tmp_path / "saved")
    two = await start(critic_warmup=2)
    await two.load(tmp_path / "saved")
    (batch,) = whole(judged(samples(seed=9)))
    for _ in range(3):
        np.testing.assert_array_equal(await one.values(batch), await two.values(batch))
        np.testing.assert_array_equal(await weights_of(one, tmp_path), await weights_of(two, tmp_path))
        await train(one, [batch])
        await train(two, [batch])


async def test_a_critic_that_was_not_asked_for_is_refused_and_so_is_a_checkpoint_without_one(
    start: Start, tmp_path: Path
) -> None:
    backend = await start()
    with pytest.raises(BackendClosed, match="start the backend with critic"):
        await backend.values(whole(samples())[0])
    assert (await backend.step(weight=1.0)).critic_grad_norm is None
    await backend.save(tmp_path / "saved")
    with pytest.raises(CheckpointCorrupt, match="critic"):
        await (await start(critic_warmup=0)).load(tmp_path / "saved")


async def test_with_a_critic_the_result_does_not_depend_on_the_cut_either(start: Start, tmp_path: Path) -> None:
    """Beyond rounding, of which Adam's second step has made up to 3e-5 with other samples, on every kind."""
    one, two = await start(critic_warmup=0), await start(critic_warmup=0)
    for _ in range(2):
        await train(one, whole(judged(samples())))
        await train(two, cut(judged(samples()), budget_tokens=12, keep_zero=True))
    np.testing.assert_allclose(await weights_of(one, tmp_path), await weights_of(two, tmp_path), atol=5e-5)
    (batch,) = whole(judged(samples()))
    np.testing.assert_allclose(await one.values(batch), await two.values(batch), atol=2e-4)


async def test_the_event_loop_stays_free_while_the_backend_computes(start: Start) -> None:
    """A timer of zero seconds fires before a large micro-batch is done."""
    backend = await start()
    order: list[str] = []
    work = asyncio.ensure_future(backend.accumulate(whole(samples(400))[0], LOSS))
    work.add_done_callback(lambda _: order.append("work"))
    await asyncio.sleep(0)
    order.append("loop")
    await work
    await asyncio.sleep(0)
    assert order == ["loop", "work"]


@pytest.mark.parametrize("kind", sorted(KINDS))
async def test_calls_outside_start_and_close_are_refused(kind: str, model_path: Path) -> None:
    backend = KINDS[kind]()
    with pytest.raises(BackendClosed, match="before start"):
        await backend.step(weight=1.0)
    await backend.start(BackendSpec(model_path=model_path))
    await backend.close()
    await backend.close()
    with pytest.raises(BackendClosed, match="after close"):
        await backend.step(weight=1.0)


async def test_a_service_backend_refuses_calls_outside_start_and_close(tmp_path: Path) -> None:
    world = ServiceWorld(tmp_path)
    await world.start()
    backend = (await world.trainer("j")).backend
    with pytest.raises(BackendClosed, match="before start"):
        await backend.step(weight=1.0)
    await backend.start(BackendSpec(model_path=tmp_path))
    await backend.close()
    await backend.close()
    with pytest.raises(BackendClosed, match="after close"):
        await backend.step(weight=1.0)
    await world.stop()
    remove_parked(tmp_path)
