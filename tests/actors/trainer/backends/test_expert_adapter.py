"""An adapter of experts, whose weights are one tensor a layer: trainer, engine and PEFT compute the same with it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from actors.models.adapter import NAME_PREFIX, AdapterSpec
from actors.rollout.engine import EngineSpec
from actors.rollout.engines.torch.torch_engine import TorchEngine
from actors.trainer.backend import BackendSpec, LossSpec
from actors.trainer.backends.torch.adapter import Switch, add_adapter
from actors.trainer.backends.torch.causal_lm import load_model
from actors.trainer.backends.torch.layers import adapted_experts
from actors.trainer.errors import ModelNotLoadable
from actors.trainer.learning.samples import TrainSample, cut
from benchmarks.gpu._model_family import make_model
from benchmarks.gpu.model_families import FAMILIES
from tests.actors.trainer.backends.test_adapter import published, scores_of, started, train
from tests.actors.trainer.backends.test_merging import TOKENS, log_probabilities, merge
from tests.actors.trainer.backends.test_routed_experts import batch_of
from tests.contracts.test_rollout_engine_contract import ask, run
from tests.tiny_checkpoint import save_tokenizer

EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
ADAPTER = AdapterSpec(rank=3, alpha=6.0, targets=("o_proj", *EXPERTS))
LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("mixtral", "gpt_oss", "granitemoe", "deepseek_v3")]


def family(name: str, directory: Path) -> Path:
    make_model(name, {**FAMILIES[name], "vocab_size": 100}, directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family("qwen3_moe", tmp_path_factory.mktemp("model"))


def with_peft(model_path: Path, adapter: Path, **how: Any) -> Any:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_path), adapter, **how)


@pytest.mark.parametrize("name", ["qwen3_moe", *LONG])
async def test_trainer_engine_peft_and_the_merged_model_say_the_same_with_a_trained_adapter_of_experts(
    name: str, tmp_path: Path
) -> None:
    """Experts of gpt_oss have biases and another order of the dimensions."""
    from transformers import AutoModelForCausalLM

    path = family(name, tmp_path / "model")
    backend, engine = await started(path, adapter=ADAPTER), TorchEngine()
    first = await scores_of(backend, TOKENS)
    await train(backend)
    trained = await scores_of(backend, TOKENS)
    assert np.abs(trained - first).max() > 0.01
    manifest, tensors = await published(backend, tmp_path / "segment")
    await engine.start(EngineSpec(model_path=path, adapter=ADAPTER, max_context_tokens=64))
    for version in (3, 4):  # the second load begins from the same weights as the first
        await engine.load_weights(tensors, {e.name: e.dtype for e in manifest.tensors}, version, in_flight="recompute")
        sample = (await run(engine, ask(0, max_tokens=12)))[0]
        np.testing.assert_allclose(sample.logprobs, await scores_of(backend, sample.tokens), atol=1e-4)
    await backend.export_checkpoint(tmp_path / "adapter")
    np.testing.assert_allclose(log_probabilities(with_peft(path, tmp_path / "adapter")), trained, atol=1e-4)
    result = merge(tmp_path / "adapter", tmp_path / "merged")
    assert result.exit_code == 0, result.output
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    np.testing.assert_allclose(log_probabilities(whole), trained, atol=1e-4)
    await engine.close()
    await backend.close()


@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3"])
async def test_peft_gives_linear_layers_beside_experts_what_they_were_trained_with(name: str, tmp_path: Path) -> None:
    """Of shared experts, whose names PEFT takes for those of experts."""
    path = family(name, tmp_path / "model")
    backend = await started(path)
    await train(backend)
    await backend.export_checkpoint(tmp_path / "adapter")
    said = log_probabilities(with_peft(path, tmp_path / "adapter"))
    np.testing.assert_allclose(said, await scores_of(backend, TOKENS), atol=1e-5)
    await backend.close()


async def test_files_name_what_peft_itself_names_for_the_same_targets(model_path: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    backend = await started(model_path, adapter=ADAPTER)
    await backend.export_checkpoint(tmp_path / "ours")
    await backend.close()
    config = peft.LoraConfig(
        r=3, lora_alpha=6.0, target_modules=["o_proj"], target_parameters=list(EXPERTS), task_type="CAUSAL_LM"
    )
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model_path), config).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert {name: tensor.shape for name, tensor in ours.items()} == {n: tensor.shape for n, tensor in theirs.items()}
    said, expected = (json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("ours", "theirs"))
    for config in (said, expected):
        config["target_parameters"] = sorted(config["target_parameters"])
    assert said == {key: expected[key] for key in said}


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("recompute", ["none", "whole"])
async def test_gradients_are_pefts_own(name: str, recompute: str, tmp_path: Path) -> None:
    path = family(name, tmp_path / "model")
    backend = await started(path, adapter=ADAPTER)
    await train(backend, 1)
    await backend.export_checkpoint(tmp_path / "adapter")
    await backend.close()
    model: Any = load_model(path, BackendSpec(model_path=path, recompute=recompute)).requires_grad_(False)
    add_adapter(model, ADAPTER, Switch(), seed=0)
    trained = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    own = {NAME_PREFIX + name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for key, parameter in own.items():
        parameter.data.copy_(trained[key])
    peft = with_peft(path, tmp_path / "adapter", is_trainable=True)
    theirs = {n.replace(".default.", "."): p for n, p in peft.named_parameters() if p.requires_grad}
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, 100, (3, 20)))
    for each in (model, peft):
        logits = each(input_ids=ids, use_cache=False).logits.log_softmax(-1)
        (-logits[:, :-1].gather(-1, ids[:, 1:, None]).mean()).backward()
    assert own.keys() == theirs.keys() == trained.keys()
    for key, parameter in own.items():
        assert parameter.grad is not None and theirs[key].grad is not None
        assert parameter.grad.abs().max() > 1e-4, key
        torch.testing.assert_close(parameter.grad, theirs[key].grad, atol=1e-5, rtol=1e-4)


async def test_given_experts_are_taken_with_an_adapter_of_experts_and_it_learns_of_them(
    model_path: Path, tmp_path: Path
) -> None:
    """The merged model, given the same experts, is the reference."""
    backend = await started(model_path, adapter=ADAPTER, router_replay=True, recompute="whole")
    batch = batch_of()
    await train(backend)
    await backend.export_checkpoint(tmp_path / "adapter")
    assert merge(tmp_path / "adapter", tmp_path / "merged").exit_code == 0
    merged = await started(tmp_path / "merged", adapter=None, router_replay=True)
    scores, expected = [await one.score(batch, temperature=1.0, reference=False) for one in (backend, merged)]
    np.testing.assert_allclose(scores, expected, atol=1e-4)
    chosen = await backend.score(dataclasses.replace(batch, routes=None), temperature=1.0, reference=False)
    assert np.abs(chosen - scores).max() > 0.05, "other experts than its own"
    await backend.accumulate(batch, LossSpec())
    assert (await backend.step(weight=10.0)).grad_norm > 0
    await merged.close()
    await backend.close()


async def responses(engine: TorchEngine, step: int) -> list[TrainSample]:
    """Eight siblings with the experts that they went to; the advantage is of small tokens."""
    engine.add([ask(8 * step + n, prompt=step, sibling=n, max_tokens=10) for n in range(8)])
    said: dict[int, list[np.ndarray]] = {}
    while engine.has_work:
        output = await engine.step()
        assert output.routes is not None
        for at, request in enumerate(np.repeat(output.requests, output.counts).tolist()):
            column = (output.tokens[at : at + 1], output.logprobs[at : at + 1], output.routes[at : at + 1])
            held = said.get(request)
            said[request] = list(column) if held is None else [*map(np.concatenate, zip(held, column, strict=True))]
    rewards = {request: float((tokens < 50).mean()) for request, (tokens, *_) in said.items()}
    return [
        TrainSample(
            prompt=step,
            sibling=request % 8,
            prompt_ids=ask(request, prompt=step).prompt_ids,
            tokens=tokens,
            logprobs=logprobs,
            stale=np.zeros(len(tokens), np.bool_),
            advantage=rewards[request] - float(np.mean(list(rewards.values()))),
            routes=routes,
        )
        for request, (tokens, logprobs, routes) in said.items()
    ]


async def test_what_the_engine_says_teaches_the_trainer_and_what_it_learns_goes_back_step_by_step(
    model_path: Path, tmp_path: Path
) -> None:
    backend, engine = await started(model_path, adapter=ADAPTER, router_replay=True), TorchEngine()
    spec = EngineSpec(model_path=model_path, adapter=ADAPTER, max_running=8, max_context_tokens=64, records_routes=True)
    await engine.start(spec)
    for step in range(4):
        samples = await responses(engine, step)
        [batch] = cut(samples, budget_tokens=10_000, keep_zero=True)
        tokens = (await backend.accumulate(batch, LossSpec())).tokens
        result = await backend.step(weight=tokens)
        assert 0 < result.grad_norm < np.inf
        assert result.stats.mismatch_sum / tokens < 1e-4, "the engine has what the trainer has learned"
        manifest, tensors = await published(backend, tmp_path / str(step))
        dtypes = {entry.name: entry.dtype for entry in manifest.tensors}
        await engine.load_weights(tensors, dtypes, step + 1, in_flight="recompute")
    await engine.close()
    await backend.close()


async def test_training_goes_on_from_a_checkpoint_and_without_the_adapter_it_is_the_model(
    model_path: Path, tmp_path: Path
) -> None:
    whole = await started(model_path, adapter=None)
    first = await started(model_path, adapter=ADAPTER, needs_reference=True)
    await train(first, 2)
    assert np.array_equal(await scores_of(first, TOKENS, reference=True), await scores_of(whole, TOKENS))
    await first.save(tmp_path / "stored")
    second = await started(model_path, adapter=ADAPTER, seed=5, needs_reference=True)
    await second.load(tmp_path / "stored")
    for backend in (first, second):
        await train(backend, 2)
    tensors, others = [(await published(b, tmp_path / str(n)))[1] for n, b in enumerate((first, second))]
    assert all(np.array_equal(tensor, others[name]) for name, tensor in tensors.items())
    for backend in (whole, first, second):
        await backend.close()


async def test_one_of_the_experts_weights_alone_has_an_adapter(model_path: Path, tmp_path: Path) -> None:
    backend = await started(model_path, adapter=AdapterSpec(rank=2, alpha=2.0, targets=("1.mlp.experts.gate_up_proj",)))
    await train(backend)
    await backend.export_checkpoint(tmp_path)
    with safe_open(tmp_path / "adapter_model.safetensors", framework="np") as file:
        names = {name.removeprefix(NAME_PREFIX) for name in file.keys()}  # noqa: SIM118 safe_open is no mapping
    assert names == {f"model.layers.1.mlp.experts.lora_{part}.weight" for part in "AB"}
    said = log_probabilities(with_peft(model_path, tmp_path))
    np.testing.assert_allclose(said, await scores_of(backend, TOKENS), atol=1e-4)
    await backend.close()


def loaded(path: Path) -> Any:
    return load_model(path, BackendSpec(model_path=path)).requires_grad_(False)


def test_experts_of_another_kind_are_said_to_be_one_tensor_that_has_no_adapter(model_path: Path) -> None:
    model: nn.Module = loaded(model_path)
    for part in model.modules():
        vars(part).pop("_is_expert_parallel", None)
    with pytest.raises(
        ModelNotLoadable, match=r"'experts\.down_proj' names no linear layer .*q_proj.* one tensor \(gate_up_"
    ):
        add_adapter(model, AdapterSpec(rank=2, alpha=2.0, targets=("experts.down_proj",)), Switch(), seed=0)


def test_experts_that_compute_in_a_way_of_their_own_are_refused(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped = adapted_experts._grouped
    monkeypatch.setattr(adapted_experts, "_grouped", lambda *args: 1.5 * grouped(*args))
    with pytest.raises(ModelNotLoadable, match=r"moves the logits of Qwen3MoeForCausalLM by .* a way of their own"):
        add_adapter(loaded(model_path), ADAPTER, Switch(), seed=0)
