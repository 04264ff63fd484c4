"""An adapter on the torch backend: what is trained, published and stored of it, and that the torch engine agrees."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.models.adapter import NAME_PREFIX, AdapterSpec
from actors.protocol.weights import Manifest
from actors.rollout.engine import EngineSpec
from actors.rollout.engines.torch.torch_engine import TorchEngine
from actors.trainer.backend import BackendSpec, LossSpec
from actors.trainer.backends.torch.torch_backend import TorchBackend
from actors.trainer.errors import CheckpointCorrupt, ModelNotLoadable
from actors.trainer.learning.samples import cut
from actors.weights.manifest import tensor_views
from tests.actors.trainer.random_samples import random_samples
from tests.contracts.test_rollout_engine_contract import ask, run
from tests.tiny_checkpoint import make_tiny_checkpoint

ADAPTER = AdapterSpec(rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


async def started(model_path: Path, **changes: object) -> TorchBackend:
    backend = TorchBackend()
    fields: dict[str, object] = {"adapter": ADAPTER, "learning_rate": 0.02} | changes
    await backend.start(BackendSpec(model_path=model_path, **fields))  # type: ignore[arg-type]
    return backend


async def train(backend: TorchBackend, steps: int = 3) -> None:
    for step in range(steps):
        for batch in cut(
            random_samples([(5, [4, 7, 3]), (3, [6, 2, 8])], seed=step), budget_tokens=10_000, keep_zero=False
        ):
            await backend.accumulate(batch, LossSpec())
        await backend.step(weight=30.0)


async def published(backend: TorchBackend, path: Path) -> tuple[Manifest, dict[str, np.ndarray]]:
    manifest = await backend.export_segment(path, job="j", policy_version=3, chunk_bytes=1 << 20)
    return manifest, tensor_views(manifest, path.read_bytes())


async def test_the_engine_samples_what_the_trainer_trains_after_an_update_and_only_the_adapter_is_published(
    model_path: Path, tmp_path: Path
) -> None:
    backend = await started(model_path)
    await train(backend)
    manifest, tensors = await published(backend, tmp_path / "segment")
    assert manifest.adapter_of
    assert all(name.startswith(NAME_PREFIX) and ".lora_" in name for name in tensors)
    engine = TorchEngine()
    await engine.start(EngineSpec(model_path=model_path, adapter=ADAPTER, max_context_tokens=64))
    before = await run(engine, ask(0, max_tokens=12))
    for version in (3, 4):  # the second load begins from the same weights as the first
        dtypes = {entry.name: entry.dtype for entry in manifest.tensors}
        await engine.load_weights(tensors, dtypes, version, in_flight="recompute")
        sample = (await run(engine, ask(0, max_tokens=12)))[0]
        assert sample.logprobs != before[0].logprobs
        assert np.allclose(sample.logprobs, await scores_of(backend, sample.tokens), atol=1e-5)
    await engine.close()
    await backend.close()


async def scores_of(
    backend: TorchBackend, tokens: list[int], *, reference: bool = False, prompt: Sequence[int] = (3, 4, 5, 6, 7)
) -> np.ndarray:
    """Log-probabilities of ``tokens`` behind ``prompt``, by default that of ``ask``."""
    [sample] = random_samples([(len(prompt), [len(tokens)])])
    sample = dataclasses.replace(sample, prompt_ids=np.array(prompt, np.int32), tokens=np.array(tokens, np.int32))
    [batch] = cut([sample], budget_tokens=10_000, keep_zero=False)
    scores = await backend.score(batch, temperature=1.0, reference=reference)
    return scores[0, len(prompt) : len(prompt) + len(tokens)]


async def test_the_reference_is_the_model_without_its_adapter(model_path: Path) -> None:
    whole, backend = await started(model_path, adapter=None), await started(model_path, needs_reference=True)
    await train(backend)
    tokens = [5, 9, 11, 40]
    first = await scores_of(whole, tokens)
    assert np.array_equal(await scores_of(backend, tokens, reference=True), first)
    assert not np.allclose(await scores_of(backend, tokens), first, atol=1e-2)
    await whole.close()
    await backend.close()


async def test_training_goes_on_from_a_checkpoint_bit_for_bit(model_path: Path, tmp_path: Path) -> None:
    first = await started(model_path)
    await train(first, 2)
    await first.save(tmp_path / "stored")
    second = await started(model_path, seed=5)
    await second.load(tmp_path / "stored")
    for backend in (first, second):
        await train(backend, 2)
    tensors, others = [(await published(b, tmp_path / str(n)))[1] for n, b in enumerate((first, second))]
    assert all(np.array_equal(tensor, others[name]) for name, tensor in tensors.items())
    await first.close()
    await second.close()


async def test_two_replicas_share_the_model_and_come_to_the_same_adapter(model_path: Path, tmp_path: Path) -> None:
    one, two = await started(model_path), await started(model_path, replicas=2, threads=2)
    for backend in (one, two):
        await train(backend)
    tensors, others = [(await published(b, tmp_path / str(n)))[1] for n, b in enumerate((one, two))]
    assert all(np.allclose(tensor, others[name], atol=1e-4) for name, tensor in tensors.items())
    assert two._core is not None
    models: list[Any] = [member.logits.model for member in two._core.policy.replicas.members]
    assert len({model.get_input_embeddings().weight.data_ptr() for model in models}) == 1
    await one.close()
    await two.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"adapter": AdapterSpec(rank=4, alpha=2.0)}, "an adapter of rank 4, alpha 8, targets all-linear"),
        ({"adapter": None}, "and the job trains a whole model"),
    ],
)
async def test_a_checkpoint_of_another_adapter_is_refused(
    model_path: Path, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    first, other = await started(model_path), await started(model_path, **changes)
    await first.save(tmp_path / "stored")
    with pytest.raises(CheckpointCorrupt, match=said):
        await other.load(tmp_path / "stored")
    await first.close()
    await other.close()


async def test_a_checkpoint_of_an_adapter_of_other_weights_is_refused(model_path: Path, tmp_path: Path) -> None:
    first = await started(model_path)
    await first.save(tmp_path / "stored")
    other = await started(make_tiny_checkpoint(tmp_path / "other", seed=1))
    with pytest.raises(CheckpointCorrupt, match="whose files are others"):
        await other.load(tmp_path / "stored")
    await first.close()
    await other.close()


@pytest.mark.parametrize("target", ["gate", "head", "embed_tokens"])
async def test_a_target_that_names_no_layer_is_refused_with_those_that_there_are(model_path: Path, target: str) -> None:
    with pytest.raises(
        ModelNotLoadable, match=rf"'{target}' names no linear layer of .* are q_proj, k_proj, .*, lm_head"
    ) as refused:
        await started(model_path, adapter=AdapterSpec(rank=4, alpha=8.0, targets=("v_proj", target)))
    assert "model.adapter.targets" in str(refused.value)


async def test_chosen_targets_alone_have_an_adapter(model_path: Path, tmp_path: Path) -> None:
    backend = await started(model_path, adapter=AdapterSpec(rank=2, alpha=8.0, targets=("q_proj", "1.mlp.up_proj")))
    names = {name.removeprefix(NAME_PREFIX + "model.layers.") for name in (await published(backend, tmp_path / "s"))[1]}
    assert names == {
        f"{layer}.lora_{part}.weight"
        for layer in ("0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.up_proj")
        for part in "AB"
    }
    await backend.close()
