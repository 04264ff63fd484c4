"""The torch backend against transformers itself and against a loop in plain torch."""

from __future__ import annotations

import asyncio
import gc
import shutil
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.trainer.backend import BackendSpec, LossSpec, MicroBatch
from actors.trainer.backends.torch import torch_backend
from actors.trainer.backends.torch.causal_lm import load_model
from actors.trainer.backends.torch.torch_backend import TorchBackend
from actors.trainer.errors import BadMicroBatch, CheckpointCorrupt, ModelNotLoadable
from actors.trainer.learning.samples import TrainSample, cut, pad
from actors.weights.manifest import tensor_views
from tests.actors.trainer.random_samples import random_sample
from tests.tiny_checkpoint import make_tiny_checkpoint

LOSS = LossSpec()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


async def started(path: Path, **changes: object) -> TorchBackend:
    backend = TorchBackend()
    await backend.start(BackendSpec(model_path=path, **changes))  # type: ignore[arg-type]
    return backend


def samples(groups: int = 3, siblings: int = 3, seed: int = 0) -> list[TrainSample]:
    rng = np.random.default_rng(seed)
    made: list[TrainSample] = []
    for prompt in range(groups):
        prompt_ids = rng.integers(3, 99, int(rng.integers(1, 6))).astype(np.int32)
        for sibling in range(siblings):
            r = int(rng.integers(1, 8))
            made.append(random_sample(rng, prompt, sibling, prompt_ids, r))
    return made


def reference_logprobs(path: Path, batch: MicroBatch, temperature: float = 1.0) -> np.ndarray:
    """One sequence at a time through transformers, no padding, no batching, no slicing."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    result = np.zeros(batch.input_ids.shape, dtype=np.float32)
    for row, (length, p) in enumerate(zip(batch.lengths, batch.prompt_lengths, strict=True)):
        ids = torch.from_numpy(batch.input_ids[row : row + 1, :length].astype(np.int64))
        with torch.no_grad():
            full = torch.log_softmax(model(input_ids=ids).logits[0].float() / temperature, dim=-1)
        chosen = full[:-1].gather(-1, ids[0, 1:, None])[:, 0].numpy()
        result[row, p:length] = chosen[p - 1 :]
    return result


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2", "opt", "gpt_neox"])
@pytest.mark.parametrize("tied", [True, False])
async def test_scores_agree_with_transformers_for_any_architecture(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    path = make_tiny_checkpoint(tmp_path, architecture=architecture, tied=tied)
    backend = await started(path)
    batch = pad(samples())
    scores = await backend.score(batch, temperature=0.7, reference=False)
    np.testing.assert_allclose(scores, reference_logprobs(path, batch, 0.7), atol=2e-5)
    await backend.close()


async def test_accumulate_gives_the_gradient_of_the_written_out_loss(model_path: Path) -> None:
    """A plain loop over sequences, plain autograd on the formulas, and no code of ours but the numbers."""
    batch = pad(samples())
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    total = torch.zeros(())
    for row, (length, p) in enumerate(zip(batch.lengths, batch.prompt_lengths, strict=True)):
        ids = torch.from_numpy(batch.input_ids[row : row + 1, :length].astype(np.int64))
        full = torch.log_softmax(model(input_ids=ids).logits[0], dim=-1)
        new = full[:-1].gather(-1, ids[0, 1:, None])[p - 1 :, 0]
        old, adv = (torch.from_numpy(c[row, p:length]) for c in (batch.behaviour_logprobs, batch.advantages))
        stale = torch.from_numpy(batch.stale[row, p:length])  # type: ignore[index]
        ratio = torch.exp(new - old)
        weight = ratio.detach().clamp(max=2.0)
        outside = stale & (((adv > 0) & (ratio > 1.2)) | ((adv < 0) & (ratio < 0.8)))
        total = total - (weight * adv * new * ~outside).sum()
    total.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}

    backend = await started(model_path)
    await backend.accumulate(batch, LOSS)
    core = backend._core
    assert core is not None
    assert core.policy.taken_stats().clipped_sum > 0, "the example must exercise the clip"
    for name, parameter in core.policy.replicas.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=2e-5)
    await backend.close()


async def test_a_step_is_adamw_on_clipped_gradients(model_path: Path) -> None:
    """Three steps against torch's own AdamW over separate parameters."""
    spec = {"learning_rate": 0.01, "weight_decay": 0.1, "max_grad_norm": 0.5, "adam_betas": (0.9, 0.95)}
    backend = await started(model_path, **spec)
    core = backend._core
    assert core is not None
    twin = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    named = dict(twin.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    for seed in range(3):
        await backend.accumulate(pad(samples(seed=seed)), LOSS)
        for name, parameter in core.policy.replicas.model.named_parameters():
            assert parameter.grad is not None
            named[name].grad = parameter.grad / 50.0
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        optimizer.step()
        result = await backend.step(weight=50.0)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    for name, parameter in core.policy.replicas.model.named_parameters():
        torch.testing.assert_close(parameter.data, named[name].data, rtol=1e-5, atol=1e-6)
    await backend.close()


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
async def test_an_export_holds_the_tensors_that_save_pretrained_stores(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    from safetensors.torch import load_file

    path = make_tiny_checkpoint(tmp_path / "model", architecture=architecture, tied=tied)
    backend = await started(path)
    manifest = await backend.export_segment(tmp_path / "segment", job="j", policy_version=0, chunk_bytes=1 << 20)
    views = tensor_views(manifest, (tmp_path / "segment").read_bytes())
    stored = load_file(path / "model.safetensors")
    assert set(views) == set(stored)
    for name, view in views.items():
        np.testing.assert_array_equal(view, stored[name].numpy())
    await backend.close()


async def test_bfloat16_trains_a_float32_master_and_exports_raw_halves(model_path: Path, tmp_path: Path) -> None:
    """A rate so small that no bfloat16 weight would move in one step still adds up over many."""
    backend = await started(model_path, dtype="bfloat16", learning_rate=1e-5)
    core = backend._core
    assert core is not None
    master, model = core.policy.parameters.master.clone(), core.policy.parameters.flat.clone()
    batch = pad(samples())
    for _ in range(3):
        await backend.accumulate(batch, LOSS)
        await backend.step(weight=10.0)
    assert core.policy.parameters.flat.dtype == torch.bfloat16
    moved = (core.policy.parameters.master - master).abs().max().item()
    assert 0 < moved <= 3.1e-5
    assert (core.policy.parameters.flat == core.policy.parameters.master.bfloat16()).all()
    assert (core.policy.parameters.flat != model).float().mean() < 0.1
    manifest = await backend.export_segment(tmp_path / "segment", job="j", policy_version=0, chunk_bytes=1 << 20)
    assert {entry.dtype for entry in manifest.tensors} == {"bfloat16"}
    raw = np.fromfile(tmp_path / "segment", dtype=np.uint16)
    np.testing.assert_array_equal(raw, core.policy.parameters.flat.view(torch.uint16).numpy())
    await backend.close()


def test_bfloat16_leaves_positions_as_exact_as_they_are_in_engines(tmp_path: Path) -> None:
    """Frequencies of 8 bits would turn the heads of token 1000 by whole radians."""
    path = make_tiny_checkpoint(tmp_path, dtype="bfloat16")
    model = load_model(path, BackendSpec(model_path=path, dtype="bfloat16"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


async def test_bfloat16_state_comes_back_bit_for_bit(model_path: Path, tmp_path: Path) -> None:
    one, two = await started(model_path, dtype="bfloat16"), await started(model_path, dtype="bfloat16")
    await one.accumulate(pad(samples()), LOSS)
    await one.step(weight=10.0)
    await one.save(tmp_path)
    await two.load(tmp_path)
    assert one._core is not None and two._core is not None
    assert torch.equal(one._core.policy.parameters.master, two._core.policy.parameters.master)
    assert torch.equal(one._core.policy.parameters.flat, two._core.policy.parameters.flat)
    for backend in (one, two):
        await backend.close()


async def test_recomputation_changes_nothing_but_memory(model_path: Path) -> None:
    batch = pad(samples())
    gradients: list[torch.Tensor] = []
    for flag in (False, True):
        backend = await started(model_path, recompute="whole" if flag else "none")
        await backend.accumulate(batch, LOSS)
        assert backend._core is not None
        gradients.append(backend._core.policy.parameters.grad.clone())
        await backend.close()
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)


async def test_a_non_finite_gradient_skips_the_update_and_leaves_the_weights(model_path: Path) -> None:
    backend = await started(model_path, learning_rate=0.1)
    core = backend._core
    assert core is not None
    before = core.policy.parameters.flat.clone()
    batch = pad(samples())
    batch.advantages[:] = np.inf
    await backend.accumulate(batch, LOSS)
    assert (await backend.step(weight=1.0)).skipped
    assert torch.equal(core.policy.parameters.flat, before)
    await backend.accumulate(pad(samples()), LOSS)
    assert not (await backend.step(weight=1.0)).skipped
    await backend.close()


async def test_an_exported_checkpoint_is_loaded_by_transformers_with_its_tokenizer(
    model_path: Path, tmp_path: Path
) -> None:
    backend = await started(model_path, learning_rate=0.01)
    batch = pad(samples())
    await backend.accumulate(batch, LOSS)
    await backend.step(weight=1.0)
    await backend.export_checkpoint(tmp_path / "hf")
    scores = await backend.score(batch, temperature=1.0, reference=False)
    np.testing.assert_allclose(scores, reference_logprobs(tmp_path / "hf", batch), atol=2e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("abc")["input_ids"] == [68, 69, 70]
    await backend.close()


async def test_state_of_another_model_is_refused(model_path: Path, tmp_path: Path) -> None:
    small = await started(make_tiny_checkpoint(tmp_path / "small", layers=1))
    await small.save(tmp_path / "saved")
    backend = await started(model_path)
    with pytest.raises(CheckpointCorrupt, match="another model"):
        await backend.load(tmp_path / "saved")
    for each in (small, backend):
        await each.close()


async def test_a_torn_tensor_file_is_refused_by_name(model_path: Path, tmp_path: Path) -> None:
    backend = await started(model_path)
    await backend.save(tmp_path)
    file = tmp_path / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointCorrupt, match="resume from another"):
        await backend.load(tmp_path)
    await backend.close()


async def test_a_directory_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ModelNotLoadable, match=str(path)):
            await started(path)


@pytest.mark.parametrize("field", ["advantages", "stale", "loss_weight"])
async def test_a_micro_batch_whose_shapes_differ_is_refused_by_field(model_path: Path, field: str) -> None:
    backend = await started(model_path)
    batch = pad(samples())
    values = {name: getattr(batch, name) for name in batch.__slots__}
    if field == "loss_weight":
        values[field] = np.ones_like(values[field])
    else:
        values[field] = values[field][:, :-1]
    with pytest.raises(BadMicroBatch, match=field):
        await backend.accumulate(MicroBatch(**values), LOSS)
    await backend.close()


async def test_training_makes_a_rewarded_token_more_likely(model_path: Path) -> None:
    backend = await started(model_path, learning_rate=3e-3)
    good, bad = np.array([5], np.int32), np.array([6], np.int32)
    prompt = np.array([10, 11], np.int32)
    before = None
    for _ in range(10):
        pair = [
            TrainSample(prompt=0, sibling=i, prompt_ids=prompt, tokens=t, logprobs=np.zeros(1, np.float32),
                        stale=np.zeros(1, np.bool_), advantage=a)
            for i, (t, a) in enumerate([(good, 1.0), (bad, -1.0)])
        ]  # fmt: skip
        (batch,) = cut(pair, budget_tokens=100, keep_zero=False)
        scores = await backend.score(batch, temperature=1.0, reference=False)
        batch.behaviour_logprobs[:] = scores
        gap = float(scores[0, 2] - scores[1, 2])
        before = gap if before is None else before
        await backend.accumulate(batch, LOSS)
        await backend.step(weight=2.0)
    assert gap > before + 1.0
    await backend.close()


async def test_now_and_then_what_a_large_step_needed_is_given_back(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    given_back: list[int] = []
    monkeypatch.setattr(torch_backend, "_GIVE_BACK_EVERY_STEPS", 3)
    monkeypatch.setattr(torch_backend, "give_back_freed_memory", lambda: given_back.append(len(steps)))
    backend = await started(model_path)
    for number in range(7):
        steps.append(number)
        await backend.accumulate(pad(samples()), LOSS)
        await backend.step(weight=1.0)
    assert given_back == [3, 6]
    await backend.close()


async def test_generation_defaults_that_transformers_does_not_save_pass_through_an_export(
    model_path: Path, tmp_path: Path
) -> None:
    """A temperature without do_sample is loaded by transformers without a word, and refused when it is saved."""
    shutil.copytree(model_path, model := tmp_path / "model")
    written = '{"eos_token_id": 1, "do_sample": false, "temperature": 0.6, "top_p": 0.9}'
    (model / "generation_config.json").write_text(written)
    backend = await started(model)
    for name in ("first", "second"):
        await backend.export_checkpoint(tmp_path / name)
        assert (tmp_path / name / "generation_config.json").read_text() == written
    await backend.close()


async def test_bundles_of_one_model_share_its_frozen_reference_and_jobs_alone_do_not(model_path: Path) -> None:
    """It says the same while one trains, for the other too, and goes with the last of them."""

    def reference(backend: TorchBackend) -> object:
        assert backend._core is not None and backend._core._reference is not None
        return backend._core._reference

    batch = pad(samples())
    one, two = [await started(model_path, needs_reference=True, parkable=True, learning_rate=0.1) for _ in range(2)]
    alone = await started(model_path, needs_reference=True)
    assert reference(one) is reference(two)
    assert reference(alone) is not reference(one)
    before = await two.score(batch, temperature=1.0, reference=True)
    await one.accumulate(batch, LOSS)
    await one.step(weight=1.0)
    np.testing.assert_array_equal(await two.score(batch, temperature=1.0, reference=True), before)
    shared = weakref.ref(reference(one))
    await one.close()
    assert shared() is not None
    await two.close()
    gc.collect()
    assert shared() is None
    await alone.close()


async def test_a_place_is_forgotten_while_a_call_hangs_in_the_backends_thread(model_path: Path) -> None:
    """A service lets go of a bundle whose call was not done in time, and others' state moves only after that."""
    backend, may_end = await started(model_path, parkable=True), threading.Event()
    hangs = asyncio.ensure_future(backend._run(may_end.wait, 60.0))
    try:
        async with asyncio.timeout(5.0):
            await backend.forget_place(memoryview(bytearray(8)))
    finally:
        may_end.set()
        await hangs
        await backend.close()
