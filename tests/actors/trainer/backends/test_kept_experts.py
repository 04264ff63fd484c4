"""Experts that stay at their rank compute and learn what they do in one process, wherever the tokens are."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from actors.models.adapter import AdapterSpec
from actors.trainer.backend import CriticSpec, LossSpec, MicroBatch, TrainBackend
from actors.trainer.backends.fsdp.fsdp_backend import FsdpBackend
from actors.trainer.backends.fsdp.kept_experts import experts_of, keep_experts
from actors.trainer.backends.fsdp.world import World
from actors.trainer.backends.torch.adapter import Switch, add_adapter
from actors.trainer.backends.torch.causal_lm import load_model
from actors.trainer.backends.torch.replicas import Replica
from actors.trainer.backends.torch.torch_backend import TorchBackend
from actors.trainer.errors import ModelNotLoadable
from actors.trainer.learning.samples import cut
from benchmarks.gpu._model_family import make_model
from benchmarks.gpu.model_families import FAMILIES
from tests.actors.trainer.backends.test_fsdp import (
    CLOSE,
    WEIGHTS_CLOSE,
    floats,
    samples,
    spec,
    state_in,
    values,
    version,
)
from tests.actors.trainer.backends.test_fsdp import train as train_both
from tests.actors.trainer.backends.test_routed_experts import EXPERTS, routed
from tests.rank_processes import RankProcesses
from tests.tiny_checkpoint import make_tiny_checkpoint

BALANCED = LossSpec(load_balancing=0.05)
KEPT: dict[str, Any] = {"expert_parallel": True}
ROUTED: dict[str, Any] = {"router_replay": True, "load_balancing": True}
GATHERED: dict[str, Any] = {"expert_parallel": False}
OF_EXPERTS = AdapterSpec(rank=3, alpha=6.0, targets=("q_proj", "experts.gate_up_proj", "experts.down_proj"))
Begin = Callable[..., Awaitable[FsdpBackend]]


def made(family: str, directory: Path) -> Path:
    make_model(family, {**FAMILIES[family], "vocab_size": 100}, directory)
    return directory


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("qwen3_moe", tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def second() -> Iterator[RankProcesses]:
    processes = RankProcesses("fsdp", 2)
    yield processes
    processes.close()


@pytest.fixture
async def begin(second: RankProcesses) -> AsyncIterator[Begin]:
    """Starts two ranks. What is begun anew ends what was there."""
    started: list[FsdpBackend] = []

    async def begun(path: Path, *, replicas: int = 1, **changes: Any) -> FsdpBackend:
        while started:
            await started.pop().close()
        started.append(FsdpBackend(second.followers(), replicas=replicas))
        await started[-1].start(spec(path, **(KEPT | changes)))
        return started[-1]

    yield begun
    for backend in started:
        await backend.close()


async def alone(path: Path, **changes: Any) -> TorchBackend:
    """One process. Of two threads each takes the rows that a rank would, by which the balance is measured."""
    backend = TorchBackend()
    await backend.start(spec(path, threads=2, replicas=2, **changes))
    return backend


def batches(seed: int, count: int = 9) -> list[MicroBatch]:
    return cut(routed(samples(seed, count)), budget_tokens=60, keep_zero=False)


async def train(backend: TrainBackend, *seeds: int, count: int = 9, balanced: bool = False) -> list[float]:
    """A step for each seed: the gradient's norms, and with ``balanced`` how unevenly experts were used."""
    found: list[float] = []
    for seed in seeds:
        for batch in batches(seed, count):
            await backend.accumulate(
                batch if balanced else dataclasses.replace(batch, routes=None), BALANCED if balanced else LossSpec()
            )
        result = await backend.step(weight=10.0)
        found += [result.grad_norm, result.stats.imbalance_sum] if balanced else [result.grad_norm]
    return found


@pytest.mark.parametrize(
    ("family", "changes", "count"),
    [
        ("qwen3_moe", ROUTED, 9),
        ("qwen3_moe", ROUTED | {"recompute": "whole"}, 1),  # a rank has no row
        pytest.param("qwen3_moe", {"recompute": "offload"}, 9, marks=pytest.mark.long),
        ("qwen3_moe", ROUTED | {"replicas": 2}, 9),  # a rank has all experts of its copy
        ("qwen3_moe", {"adapter": AdapterSpec(rank=3, alpha=6.0), "needs_reference": True}, 9),
        ("qwen3_moe", GATHERED | {"adapter": OF_EXPERTS, "recompute": "whole"}, 9),
        pytest.param("gpt_oss", {}, 9, marks=pytest.mark.long),  # biases, and another order of the dimensions
        pytest.param("deepseek_v3", {}, 9, marks=pytest.mark.long),
        pytest.param("granitemoe", {}, 9, marks=pytest.mark.long),
        pytest.param("mixtral", {}, 9, marks=pytest.mark.long),
    ],
)
async def test_two_ranks_train_what_one_process_trains(
    begin: Begin, path: Path, tmp_path: Path, family: str, changes: dict[str, Any], count: int
) -> None:
    """Log-probabilities, gradients and the balance, with the engine's routes too."""
    path = path if family == "qwen3_moe" else made(family, tmp_path / "model")
    ranks = await begin(path, **changes)
    one = await alone(path, **{key: value for key, value in changes.items() if key != "replicas"})
    is_routed = "router_replay" in changes
    for batch in batches(7, count):
        asked = batch if is_routed else dataclasses.replace(batch, routes=None)
        ours, theirs = [await each.score(asked, temperature=0.7, reference=False) for each in (ranks, one)]
        np.testing.assert_allclose(ours, theirs, atol=CLOSE)
    ours, theirs = [await train(each, 1, 2, 3, count=count, balanced=is_routed) for each in (ranks, one)]
    assert not is_routed or min(ours) > 0
    np.testing.assert_allclose(ours, theirs, rtol=3 * CLOSE)
    weights, expected = await version(ranks, tmp_path / "a"), await version(one, tmp_path / "b")
    np.testing.assert_allclose(floats(weights), floats(expected), atol=WEIGHTS_CLOSE)


async def test_a_rank_whose_experts_nobody_chose_does_its_part_of_every_exchange(begin: Begin, tmp_path: Path) -> None:
    path = made("qwen3_moe", tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    gates = {name: torch.zeros_like(own) for name, own in weights.items() if name.endswith(".gate.weight")}
    assert gates
    save_file(weights | gates, path / "model.safetensors", metadata={"format": "pt"})  # every token chooses the same
    ranks, one = await begin(path), await alone(path)
    assert ranks._core is not None
    counts = set[int]()
    for layer in experts_of(ranks._core.policy.model):
        computed = layer.forward._computed
        layer.forward._computed = lambda tokens, experts, to=computed: (counts.add(len(tokens)), to(tokens, experts))[1]
    assert await train(ranks, 1) == pytest.approx(await train(one, 1), rel=CLOSE)
    assert counts == {0} or 0 not in counts
    tokens = sum(int(batch.lengths.sum()) for batch in batches(1))
    assert counts == {0} or max(counts) >= tokens / len(batches(1)), "all of them on one rank"
    ours, theirs = await version(ranks, tmp_path / "a"), await version(one, tmp_path / "b")
    np.testing.assert_allclose(floats(ours), floats(theirs), atol=WEIGHTS_CLOSE)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.long)])
async def test_the_same_bits_again_and_files_that_every_other_way_to_train_reads_and_writes(
    begin: Begin, path: Path, tmp_path: Path, dtype: str
) -> None:
    ranks = await begin(path, dtype=dtype)
    before = await train(ranks, 1, 2), await version(ranks, tmp_path)
    ranks = await begin(path, dtype=dtype)
    assert (await train(ranks, 1, 2), await version(ranks, tmp_path)) == before
    await ranks.save(tmp_path / "kept")
    await ranks.export_checkpoint(tmp_path / "kept-export")
    norms = await train(ranks, 3)
    plain = await begin(path, dtype=dtype, expert_parallel=False)
    await plain.load(tmp_path / "kept")
    assert await version(plain, tmp_path) == before[1]
    await plain.save(tmp_path / "plain")
    await plain.export_checkpoint(tmp_path / "plain-export")
    expected, same = state_in(tmp_path / "kept"), state_in(tmp_path / "plain")
    assert all(torch.equal(expected[name], same[name]) for name in expected)
    for file in (tmp_path / "kept-export").iterdir():
        assert file.read_bytes() == (tmp_path / "plain-export" / file.name).read_bytes()
    one = await alone(path, dtype=dtype)
    await one.load(tmp_path / "plain")
    assert await version(one, tmp_path) == before[1]
    await one.save(tmp_path / "flat")
    ranks = await begin(path, dtype=dtype)
    for saved in ("plain", "flat"):
        await ranks.load(tmp_path / saved)
        assert await train(ranks, 3) == norms


async def test_a_rank_holds_its_own_experts_and_nobody_gathers_them(begin: Begin, path: Path) -> None:
    ranks = await begin(path, adapter=AdapterSpec(rank=2, alpha=2.0), dtype="bfloat16")
    await train(ranks, 1)
    assert ranks._core is not None
    layers = experts_of(ranks._core.policy.model)
    assert layers
    for layer in layers:
        for own in layer.parameters():
            assert isinstance(own, DTensor)
            assert own.shape[0] == EXPERTS and own.to_local().shape[0] == EXPERTS // 2
            assert own.dtype == torch.bfloat16 and own.grad is None
            assert own.to_local().untyped_storage().nbytes() == own.to_local().nbytes, "the others are gone"


@pytest.mark.long
async def test_experts_of_a_critic_and_of_a_reference_stay_as_well(begin: Begin, path: Path) -> None:
    trained: dict[str, Any] = {"critic": CriticSpec(model_path=path, learning_rate=1e-3), "needs_reference": True}
    ranks, one = await begin(path, **trained), await alone(path, **trained)
    core = ranks._core
    assert core is not None and core.critic is not None and isinstance(core._reference, Replica)
    for model in (core.critic.model, core._reference.logits.model):
        layers = experts_of(model)
        assert layers and all(layer.down_proj.to_local().shape[0] == EXPERTS // 2 for layer in layers)
    np.testing.assert_allclose(await values(ranks), await values(one), atol=CLOSE)
    np.testing.assert_allclose(await train_both(ranks, 2, 3), await train_both(one, 2, 3), rtol=1e-4)
    np.testing.assert_allclose(await values(ranks), await values(one), atol=2e-4)
    for batch in batches(7):
        asked = dataclasses.replace(batch, routes=None)
        ours, theirs = [await each.score(asked, temperature=1.0, reference=True) for each in (ranks, one)]
        np.testing.assert_allclose(ours, theirs, atol=CLOSE)


async def test_a_model_without_experts_is_refused_and_the_ranks_live_on(
    begin: Begin, path: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelNotLoadable, match=r"trainer\.expert_parallel: Qwen3ForCausalLM has no experts"):
        await begin(make_tiny_checkpoint(tmp_path / "dense"))
    assert await train(await begin(path), 1)


@pytest.mark.parametrize("shards", [3, 5])
def test_experts_that_leave_none_for_some_rank_are_refused(path: Path, shards: int) -> None:
    world = cast(World, SimpleNamespace(shards=shards))
    with pytest.raises(ModelNotLoadable, match=f"has 4 experts a layer, which leaves none for some of the {shards} ra"):
        keep_experts(load_model(path, spec(path)), world, spec(path), offload=False)


def test_experts_with_an_adapter_are_not_kept(path: Path) -> None:
    model = load_model(path, spec(path)).requires_grad_(False)
    add_adapter(model, OF_EXPERTS, Switch(), seed=0)
    with pytest.raises(ModelNotLoadable, match=r"kept at their ranks have no adapters; name other layers"):
        keep_experts(model, cast(World, SimpleNamespace(shards=2)), spec(path), offload=False)


@pytest.mark.long
async def test_ranks_export_the_adapter_of_experts_that_one_process_exports(
    begin: Begin, path: Path, tmp_path: Path
) -> None:
    one, ranks = await alone(path, adapter=OF_EXPERTS), await begin(path, **GATHERED, adapter=OF_EXPERTS)
    await train(one, 1)
    await one.save(tmp_path / "saved")
    await ranks.load(tmp_path / "saved")
    for name, backend in (("a", ranks), ("b", one)):
        await backend.export_checkpoint(tmp_path / name)
    ours, theirs = ({f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in ("a", "b"))
    assert ours == theirs
