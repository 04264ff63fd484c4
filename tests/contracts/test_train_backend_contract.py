"""What every train backend promises (``actors/trainer/backend.py``), asserted for all kinds; torch on CPU and CUDA.

A training service is a kind of its own, over each of the others: jobs that share one, asked over a transport, and one
of two ranks. Kinds
with ``-adapter`` train an adapter of the policy, ``-muon`` and ``-adamw8bit`` with that optimizer; ``fsdp:2`` is a
world of two ranks, in two processes; with ``-experts`` each keeps its experts, with ``-context`` they share each row.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from actors.core.watch import Down, Gone
from actors.protocol.weights import Manifest
from actors.ranks.errors import RankLost
from actors.train_service.residency import remove_parked
from actors.trainer.backend import (
    NO_STATS,
    BackendSpec,
    LossSpec,
    MicroBatch,
    MicroBatchStats,
    TrainBackend,
    summed,
)
from actors.trainer.backends.simulated_backend import SimulatedBackend
from actors.trainer.backends.torch.packing import choose
from actors.trainer.backends.torch.replicas import Replica
from actors.trainer.bounded import bounded
from actors.trainer.errors import BackendClosed, CheckpointCorrupt, OutOfMemory
from actors.trainer.learning.samples import TrainSample, cut, pad
from actors.weights.manifest import check_manifest, chunk_bounds, chunk_is_intact, tensor_views
from benchmarks.gpu._model_family import make_model
from benchmarks.gpu.model_families import FAMILIES
from configs.checks.checks import installed
from configs.limits import DEFAULT_LIMITS
from tests.actors.train_service.service_world import ServiceWorld
from tests.actors.trainer.random_samples import random_samples
from tests.contracts.backend_worlds import KINDS, STARTED_WITH, Place, Start, started_backends, weights_of
from transport.address import ActorAddress, PeerId

LOSS = LossSpec()
LONG_ROW = [(420, [60, 50, 65, 40]), (5, [560]), (40, [50])]
"""(prompt tokens, response tokens of each sibling): a tree, and documents beside it."""
WORLDS = [
    *sorted(KINDS),
    "torch-adapter",
    "torch-muon",
    pytest.param(
        "torch-adamw8bit", marks=pytest.mark.skipif(not installed("bitsandbytes"), reason="no bitsandbytes here")
    ),
    "service:torch",
    "service:torch-adapter",
    "service:simulated",
    pytest.param("service:fsdp:2", marks=pytest.mark.long),
    "fsdp:2",
    "fsdp:2-adapter",
    pytest.param("fsdp:2-experts", marks=pytest.mark.long),
    pytest.param("fsdp:2-context", marks=pytest.mark.long),
    pytest.param("fsdp:4", marks=pytest.mark.long),
    *(
        pytest.param(world, marks=pytest.mark.gpu)
        for world in ("torch-cuda", "torch-adapter-cuda", "fsdp-cuda", "fsdp-adapter-cuda")
    ),
]
STRANGER = ActorAddress("nobody", PeerId("elsewhere", 1))


@pytest.fixture
def rounding(request: pytest.FixtureRequest) -> float:
    """Most by which a step may differ if sums were added in another order.

    Muon computes its updates in bfloat16, and moments of 8 bits may be rounded to the neighbouring number.
    """
    return 5e-4 if "muon" in request.node.name or "adamw8bit" in request.node.name else 2e-5


@pytest.fixture(params=WORLDS)
async def start(request: pytest.FixtureRequest, place: Place) -> AsyncIterator[Start]:
    async with started_backends(request.param, place) as begin:
        yield begin


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


async def train(backend: TrainBackend, batches: list[MicroBatch], weight: float = 10.0) -> None:
    for batch in batches:
        await backend.accumulate(batch, LOSS)
    await backend.step(weight=weight)


async def test_the_result_of_a_step_does_not_depend_on_how_the_batch_was_cut(
    start: Start, tmp_path: Path, rounding: float
) -> None:
    one, two = await start(), await start()
    fine = cut(samples(), budget_tokens=12, keep_zero=False)
    assert len(fine) > 2
    await train(one, whole(samples()))
    await train(two, fine)
    np.testing.assert_allclose(await weights_of(one, tmp_path), await weights_of(two, tmp_path), atol=rounding)


async def test_long_rows_in_blocks_train_as_sequences_by_themselves(
    start: Start, tmp_path: Path, rounding: float
) -> None:
    """One row holds all of them and is longer than a block of attention."""
    long = random_samples(LONG_ROW, 1, vocabulary=3)
    row = pad(long)
    layout = choose(row, row.loss_weight != 0, hidden=32, may_pack=True, long_rows=True)
    assert layout.ends is not None
    assert layout.input_ids.shape[0] == 1
    one, two = await start(max_grad_norm=1e9, needs_reference=True), await start(max_grad_norm=1e9)
    await train(one, [row], weight=100.0)
    await train(two, cut(long, budget_tokens=1, keep_zero=False), weight=100.0)
    np.testing.assert_allclose(await weights_of(one, tmp_path), await weights_of(two, tmp_path), atol=2.5 * rounding)
    for reference in (True, False):
        scores = await one.score(row, temperature=1.0, reference=reference)
        alone = [
            await one.score(part, temperature=1.0, reference=reference) for part in map(pad, zip(long, strict=True))
        ]
        for member, found in enumerate(alone):
            np.testing.assert_allclose(scores[member, : found.shape[1]], found[0], atol=max(5e-4, 10 * rounding))


async def test_a_critic_judges_long_rows_as_sequences_by_themselves(start: Start) -> None:
    backend = await start(critic_warmup=0)
    long = judged(random_samples(LONG_ROW, 1, vocabulary=3))
    values = await backend.values(pad(long))
    for member, sample in enumerate(long):
        alone = await backend.values(pad([sample]))
        np.testing.assert_allclose(values[member, : alone.shape[1]], alone[0], atol=5e-4)


async def measured(backend: TrainBackend, batches: list[MicroBatch], weight: float = 10.0) -> MicroBatchStats:
    """Statistics of a step, from the backend's answers to its calls together."""
    parts = [await backend.accumulate(batch, LOSS) for batch in batches]
    return summed([*parts, (await backend.step(weight=weight)).stats])


async def test_statistics_add_up_over_micro_batches(start: Start) -> None:
    backend = await start(learning_rate=0.0)
    parts = await measured(backend, cut(samples(), budget_tokens=12, keep_zero=False))
    all_of_it = await measured(backend, whole(samples()))
    assert parts.tokens == all_of_it.tokens == sum(s.tokens.size for s in samples())
    assert parts.entropy_sum > 0
    for name in ("weight", "loss_sum", "clipped_sum", "entropy_sum", "mismatch_sum"):
        assert getattr(parts, name) == pytest.approx(getattr(all_of_it, name), rel=1e-3, abs=1e-3)


async def test_what_was_dropped_is_in_no_statistics(start: Start) -> None:
    backend = await start(learning_rate=0.0)
    (batch,) = whole(samples())
    await backend.accumulate(batch, LOSS)
    await backend.drop_sums()
    assert (await backend.step(weight=1.0)).stats == NO_STATS


async def test_what_staleness_adds_to_the_distance_from_the_engine_is_counted_apart(start: Start) -> None:
    """A sample that an older version began is stale as a whole: the engine's cache still has what that one computed."""
    backend = await start(learning_rate=0.0)
    fresh = samples()
    old = [dataclasses.replace(s, stale=np.arange(s.tokens.size) == 0, logprobs=s.logprobs - 1) for s in fresh[:3]]
    without = await measured(backend, whole(fresh[3:]))
    both = await measured(backend, whole([*old, *fresh[3:]]))
    assert (without.older_tokens, without.older_mismatch_sum) == (0, 0.0)
    assert both.older_tokens == sum(s.tokens.size for s in old)
    apart = both.mismatch_sum - both.older_mismatch_sum
    assert apart == pytest.approx(without.mismatch_sum, rel=1e-3, abs=1e-3)


async def test_experts_that_the_engine_chose_reach_every_rank(
    start: Start, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Kinds that compute score otherwise with other experts; a reference chooses for itself."""
    path = tmp_path / "moe"
    make_model("qwen3_moe", {**FAMILIES["qwen3_moe"], "vocab_size": 100}, path)
    backend = await start(model_path=path, router_replay=True, needs_reference=True)
    rng = np.random.default_rng(1)
    plain = samples()
    routed = [dataclasses.replace(s, routes=rng.integers(1, 5, (s.tokens.size, 4)).astype(np.uint8)) for s in plain]
    scores = [await backend.score(pad(part), temperature=1.0, reference=False) for part in (plain, routed)]
    frozen = [await backend.score(pad(part), temperature=1.0, reference=True) for part in (plain, routed)]
    if not any(made_up in request.node.name for made_up in ("simulated", "bounded")):
        assert np.abs(scores[0] - scores[1]).max() > 1e-3
    np.testing.assert_array_equal(frozen[0], frozen[1])
    for row in (1, 5):
        [alone] = await backend.score(pad(routed[row : row + 1]), temperature=1.0, reference=False)
        np.testing.assert_allclose(alone, scores[1][row][: len(alone)], atol=2e-5)


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


def leave_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every pass fails for lack of memory when it has added its gradients to the sums."""

    def failing(self: Replica, batch: MicroBatch, loss: LossSpec, *, learn: bool = True) -> MicroBatchStats:
        computed(self, batch, loss, learn=learn)
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: 1 byte")

    computed = Replica.accumulate
    monkeypatch.setattr(Replica, "accumulate", failing)
    monkeypatch.setattr(SimulatedBackend, "memory_tokens", 0)


async def test_after_a_pass_without_memory_a_step_is_what_it_would_have_been_or_the_life_is_over(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks may wait for each other in the middle of an exchange: they begin anew."""
    one, two = await start(), await start()
    first, *rest = cut(samples(), budget_tokens=12, keep_zero=False)
    await one.accumulate(first, LOSS)
    with monkeypatch.context() as short:
        leave_no_memory(short)
        with pytest.raises(OutOfMemory):
            await one.accumulate(rest[0], LOSS)
    if one.kind == "fsdp":
        with pytest.raises(RankLost, match="begin anew from the newest checkpoint"):
            await one.drop_sums()
        return
    await one.drop_sums()
    for backend in (one, two):
        await train(backend, [first, *rest])
    np.testing.assert_array_equal(await weights_of(one, tmp_path), await weights_of(two, tmp_path))


async def test_sums_that_are_dropped_or_only_measured_leave_nothing(start: Start, tmp_path: Path) -> None:
    backend = await start()
    before = await weights_of(backend, tmp_path)
    (batch,) = whole(samples())
    await backend.accumulate(batch, LOSS)
    await backend.drop_sums()
    use = await backend.measure(batch, LOSS)
    assert use is None or (use.peak_bytes >= 0 and use.free_bytes > 0)
    assert (await backend.step(weight=1.0)).grad_norm == 0.0
    np.testing.assert_array_equal(await weights_of(backend, tmp_path), before)


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
        weight = (told := await backend.accumulate(batch, LOSS)).weight
        result = await backend.step(weight=weight)
        losses.append(summed([told, result.stats]).value_loss_sum / weight)
        assert result.critic_grad_norm is not None and result.critic_grad_norm > 0
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
        assert summed([stats, result.stats]).entropy_sum > 0
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


async def test_with_a_critic_the_result_does_not_depend_on_the_cut_either(
    start: Start, tmp_path: Path, rounding: float
) -> None:
    """Beyond rounding, of which Adam's second step has made up to 3e-5 with other samples, on every kind."""
    one, two = await start(critic_warmup=0), await start(critic_warmup=0)
    for _ in range(2):
        await train(one, whole(judged(samples())))
        await train(two, cut(judged(samples()), budget_tokens=12, keep_zero=True))
    np.testing.assert_allclose(await weights_of(one, tmp_path), await weights_of(two, tmp_path), atol=2.5 * rounding)
    (batch,) = whole(judged(samples()))
    np.testing.assert_allclose(await one.values(batch), await two.values(batch), atol=10 * rounding)


async def test_without_kept_state_it_starts_with_the_model(start: Start) -> None:
    assert STARTED_WITH[id(await start())] is None


@pytest.mark.parametrize("keep", [True, False])
async def test_the_next_life_goes_on_from_committed_state_that_was_kept_or_begins_anew(
    start: Start, tmp_path: Path, keep: bool
) -> None:
    """A backend of the trainer's own keeps nothing: its next life has the checkpoints."""
    one = await start(job="j")
    fresh = await weights_of(one, tmp_path)
    await train(one, whole(samples()))
    trained = await weights_of(one, tmp_path)
    one.committed(1)
    await one.close(keep=keep)
    two = await start(job="j")
    resumed = STARTED_WITH[id(two)]
    assert resumed == (1 if keep and two.is_shared else None)
    np.testing.assert_array_equal(await weights_of(two, tmp_path), fresh if resumed is None else trained)


async def test_what_the_trainer_says_and_hears_between_calls_changes_nothing(start: Start, tmp_path: Path) -> None:
    backend = await start()
    await train(backend, whole(samples()))
    before = await weights_of(backend, tmp_path)
    backend.committed(1)
    backend.heard(Down(address=STRANGER, reason=Gone.STOPPED))
    np.testing.assert_array_equal(await weights_of(backend, tmp_path), before)


async def test_what_it_adds_to_a_steps_row_is_of_the_calls_since_it_was_asked_last(start: Start) -> None:
    backend = await start()
    await train(backend, whole(samples()))
    first, second = backend.taken_metrics(), backend.taken_metrics()
    assert set(first) == set(second)
    assert all(value >= 0 for value in first.values())
    assert not any(second.values())


async def test_one_that_waits_for_its_turn_has_its_limits_where_it_computes_and_the_others_here(start: Start) -> None:
    backend = await start()
    assert (bounded(backend, DEFAULT_LIMITS) is backend) == backend.is_shared


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
