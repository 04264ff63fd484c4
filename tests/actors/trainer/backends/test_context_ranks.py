"""Ranks that share each row compute what one rank computes: in processes that meet as those of a run do."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.ranks.errors import RankLost
from actors.trainer.backend import BackendSpec, CriticSpec, LossSpec, MicroBatch, TrainBackend, summed
from actors.trainer.backends.fsdp.fsdp_backend import FsdpBackend
from actors.trainer.backends.torch.attention.context import ContextRanks
from actors.trainer.backends.torch.torch_backend import TorchBackend
from actors.trainer.errors import ModelNotLoadable
from actors.trainer.learning.samples import TrainSample, pad
from benchmarks.gpu._model_family import make_model
from benchmarks.gpu.model_families import FAMILIES
from configs.limits import Limits
from tests.rank_processes import RankProcesses
from tests.tiny_checkpoint import make_tiny_checkpoint

GROUPS: dict[str, list[tuple[int, list[int]]]] = {
    "causal": [(9, [700])],
    "tree": [(300, [120, 160, 200, 90])],
    "documents": [(30, [300]), (5, [260]), (80, [41]), (3, [2])],
    "short rows": [(4, [3, 7, 5]), (2, [1])],
}
"""(prompt tokens, response tokens of each sibling)."""
Start = Callable[..., Awaitable[FsdpBackend]]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def second() -> Iterator[RankProcesses]:
    processes = RankProcesses("fsdp", 2)
    yield processes
    processes.close()


@pytest.fixture
async def start(second: RankProcesses) -> AsyncIterator[Start]:
    started: list[FsdpBackend] = []

    async def begin(spec: BackendSpec) -> FsdpBackend:
        started.append(FsdpBackend(second.followers(), Limits(rank_settle_s=1.0), context=2))
        await started[-1].start(spec)
        return started[-1]

    yield begin
    for backend in started:
        await backend.close()


def batch_of(groups: list[tuple[int, list[int]]]) -> MicroBatch:
    """Siblings that begin alike, with everything that a critic and a reference say of them."""
    rng, made = np.random.default_rng(0), list[TrainSample]()
    for prompt, (prompt_tokens, responses) in enumerate(groups):
        prompt_ids = rng.integers(3, 99, prompt_tokens).astype(np.int32)
        alike = rng.integers(3, 99, min(responses) // 2).astype(np.int32)
        for sibling, count in enumerate(responses):
            tokens = np.concatenate([alike, rng.integers(3, 99, count - alike.size)]).astype(np.int32)
            old, returns = rng.normal(size=(2, count)).astype(np.float32)
            made.append(
                TrainSample(
                    prompt=prompt, sibling=sibling, prompt_ids=prompt_ids, tokens=tokens,
                    logprobs=rng.normal(-4.6, 0.1, count).astype(np.float32), stale=np.zeros(count, np.bool_),
                    advantage=rng.normal(size=count).astype(np.float32), old_values=old, returns=returns,
                )
            )  # fmt: skip
    return pad(made)


async def step(backend: TrainBackend, batch: MicroBatch, loss: LossSpec, directory: Path) -> dict[str, Any]:
    """All that a trainer asks for in a step."""
    directory.mkdir()
    scores = await backend.score(batch, temperature=0.7, reference=False)
    values = await backend.values(batch)
    told = dataclasses.replace(batch, reference_logprobs=await backend.score(batch, temperature=1.0, reference=True))
    stats = await backend.accumulate(told, loss)
    result = await backend.step(weight=float(batch.loss_weight.sum()))
    await backend.export_segment(directory / "v", job="j", policy_version=1, chunk_bytes=1 << 20)
    weights = np.fromfile(directory / "v", np.float32)
    norms = np.array([result.grad_norm, result.critic_grad_norm])
    sums = np.array([float(value) for value in dataclasses.asdict(summed([stats, result.stats])).values()])
    return {"scores": scores, "values": values, "sums": sums, "norms": norms, "weights": weights}


@pytest.mark.parametrize("kind", GROUPS)
async def test_two_ranks_that_share_each_row_score_learn_and_step_as_one_does(
    start: Start, model_path: Path, tmp_path: Path, kind: str
) -> None:
    critic = CriticSpec(model_path=model_path, learning_rate=1e-3)
    spec = BackendSpec(model_path=model_path, learning_rate=1e-3, critic=critic, needs_reference=True)
    loss = LossSpec(kl_coefficient=0.1, entropy_coefficient=0.01, temperature=0.7, surrogate="sequence")
    batch = batch_of(GROUPS[kind])
    alone = TorchBackend()
    await alone.start(spec)
    expected = await step(alone, batch, loss, tmp_path / "one")
    found = await step(await start(spec), batch, loss, tmp_path / "two")
    for name, numbers in expected.items():
        np.testing.assert_allclose(found[name], numbers, rtol=2e-4, atol=2e-5, err_msg=name)
    assert np.abs(expected["scores"]).max() > 1
    await alone.close()


async def test_rows_with_sliding_windows_are_shared_too(start: Start, tmp_path: Path) -> None:
    """A model with windows in every other layer, and rows of several blocks."""
    make_model("gemma3_text", {**FAMILIES["gemma3_text"], "vocab_size": 100}, tmp_path / "model")
    spec = BackendSpec(model_path=tmp_path / "model")
    batch, alone = batch_of(GROUPS["tree"]), TorchBackend()
    await alone.start(spec)
    expected = await alone.score(batch, temperature=1.0, reference=False)
    found = await (await start(spec)).score(batch, temperature=1.0, reference=False)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    await alone.close()


async def test_a_model_whose_rows_cannot_be_shared_is_refused_with_what_to_do(start: Start, tmp_path: Path) -> None:
    make_model("bloom", {**FAMILIES["bloom"], "vocab_size": 100}, tmp_path / "model")
    with pytest.raises(ModelNotLoadable, match=r"context_ranks: 2 ranks cannot share a row of .*Bloom"):
        await start(BackendSpec(model_path=tmp_path / "model"))


@pytest.mark.long
async def test_a_rank_that_is_killed_is_lost_to_the_one_that_shares_its_rows(model_path: Path) -> None:
    processes, batch = RankProcesses("fsdp", 2), batch_of(GROUPS["tree"])
    ranks = FsdpBackend(processes.followers(), Limits(train_step_timeout_s=20.0), context=2)
    try:
        await ranks.start(BackendSpec(model_path=model_path))
        await ranks.accumulate(batch, LossSpec())
        processes.processes[0].send_signal(signal.SIGKILL)
        with pytest.raises(RankLost):
            await ranks.accumulate(batch, LossSpec())
    finally:
        with contextlib.suppress(RankLost):
            await ranks.close()
        processes.close()


def test_slices_cover_each_row_once_and_have_causal_work_alike() -> None:
    for count in (2, 3, 4):
        ranks = [ContextRanks(None, rank, count) for rank in range(count)]  # type: ignore[arg-type]
        length = ranks[0].padded(1001)
        assert length - 1001 < 2 * count
        parts = [one.positions(length) for one in ranks]
        assert sorted(np.concatenate(parts)) == list(range(length))
        assert len({int(part.sum()) for part in parts}) == 1
