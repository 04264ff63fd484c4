"""The torch critic against plain transformers and plain autograd: values, gradients of both models, where it begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from actors.trainer.backend import BackendSpec, CriticSpec, LossSpec, MicroBatch
from actors.trainer.backends.torch.torch_backend import TorchBackend
from actors.trainer.errors import ModelNotLoadable
from actors.trainer.learning.samples import pad
from tests.contracts.test_train_backend_contract import judged, samples
from tests.tiny_checkpoint import make_tiny_checkpoint, save_tokenizer

LOSS = LossSpec(value_clip=0.1)


@pytest.fixture(scope="module")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def reward_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reward_model(tmp_path_factory.mktemp("reward"))


def reward_model(path: Path, labels: int = 1, vocab: int = 100) -> Path:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(7)
    made: Any = LlamaConfig
    config = made(
        vocab_size=vocab, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512, num_labels=labels, initializer_range=0.5,
        pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(path)
    save_tokenizer(path, vocab)
    return path


async def started(policy: Path, critic: Path, **changes: Any) -> TorchBackend:
    backend = TorchBackend()
    spec = CriticSpec(model_path=critic, learning_rate=0.02)
    await backend.start(BackendSpec(model_path=policy, learning_rate=0.01, critic=spec, **changes))
    return backend


def written_out_values(path: Path, batch: MicroBatch, head: torch.Tensor) -> tuple[Any, dict[tuple[int, int], Any]]:
    """The backbone, and each response token's value with its gradient, sequence by sequence."""
    model: Any = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    values: dict[tuple[int, int], Any] = {}
    for row, (length, p) in enumerate(zip(batch.lengths.tolist(), batch.prompt_lengths.tolist(), strict=True)):
        ids = torch.from_numpy(batch.input_ids[row : row + 1, :length].astype(np.int64))
        hidden = model(input_ids=ids).last_hidden_state[0]
        for t in range(p, length):
            values[row, t] = hidden[t - 1] @ head[0]
    return model, values


async def test_values_of_a_reward_model_are_its_head_on_the_state_before_each_token(
    policy_path: Path, reward_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    judge: Any = AutoModelForSequenceClassification.from_pretrained(reward_path, dtype=torch.float32)
    batch = pad(judged(samples()))
    backend = await started(policy_path, reward_path)
    found = await backend.values(batch)
    _, expected = written_out_values(reward_path, batch, judge.score.weight.detach())
    for (row, t), value in expected.items():
        assert found[row, t] == pytest.approx(float(value.detach()), abs=1e-4)
    assert np.abs(found).max() > 0.1
    await backend.close()


@pytest.mark.parametrize("replicas", [1, 2])
async def test_one_micro_batch_gives_both_models_the_gradients_of_the_written_out_loss(
    policy_path: Path, reward_path: Path, replicas: int
) -> None:
    """Plain loops and plain autograd on: policy gradient of each token, and 0.5 max((V - R)², (clip(V) - R)²)."""
    from transformers import AutoModelForSequenceClassification

    batch = pad(judged(samples()))
    assert batch.old_values is not None and batch.returns is not None and batch.stale is not None
    policy: Any = AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float32).eval()
    judge: Any = AutoModelForSequenceClassification.from_pretrained(reward_path, dtype=torch.float32)
    head = judge.score.weight.detach().clone().requires_grad_(True)
    backbone, values = written_out_values(reward_path, batch, head)
    total, expected_loss = torch.zeros(()), 0.0
    for row, (length, p) in enumerate(zip(batch.lengths.tolist(), batch.prompt_lengths.tolist(), strict=True)):
        ids = torch.from_numpy(batch.input_ids[row : row + 1, :length].astype(np.int64))
        logprobs = torch.log_softmax(policy(input_ids=ids).logits[0], dim=-1)
        for t in range(p, length):
            new = logprobs[t - 1, ids[0, t]]
            ratio = torch.exp(new.detach() - float(batch.behaviour_logprobs[row, t])).clamp(max=2.0)
            total = total - ratio * float(batch.advantages[row, t]) * new
            old, target = float(batch.old_values[row, t]), float(batch.returns[row, t])
            near = old + (values[row, t] - old).clamp(-0.1, 0.1)
            value_loss = 0.5 * torch.maximum((values[row, t] - target) ** 2, (near - target) ** 2)
            expected_loss += float(value_loss.detach())
            total = total + value_loss
    total.backward()

    backend = await started(policy_path, reward_path, replicas=replicas, threads=replicas)
    core = backend._core
    assert core is not None and core.critic is not None
    stats = await backend.accumulate(batch, LOSS)
    of_device = await backend._run(core.critic.taken_stats)
    assert of_device.value_loss_sum == pytest.approx(expected_loss, rel=1e-4)
    assert 0 < of_device.value_clipped_sum < stats.tokens
    await backend._run(core.critic.parameters.gather_gradients)
    await backend._run(core.policy.parameters.gather_gradients)
    expected = {f"backbone.{name}": p.grad for name, p in backbone.named_parameters()} | {"head.weight": head.grad}
    for name, parameter in core.critic.replicas.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-4)
    expected = {name: p.grad for name, p in policy.named_parameters()}
    for name, parameter in core.policy.replicas.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-4)
    await backend.close()


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2", "opt", "gpt_neox"])
async def test_the_policy_becomes_a_critic_whose_backbone_learns_at_once_and_packs_as_the_policy_does(
    tmp_path: Path, architecture: str
) -> None:
    path = make_tiny_checkpoint(tmp_path, architecture=architecture)
    backend = await started(path, path)
    batch = pad(judged(samples()))
    twin = await started(path, path, replicas=2, threads=2)
    np.testing.assert_allclose(await backend.values(batch), await twin.values(batch), atol=1e-5)
    await twin.close()
    core = backend._core
    assert core is not None and core.critic is not None
    critic: Any = core.critic.replicas.members[0]
    policy: Any = core.policy.replicas.members[0]
    assert critic.logits.may_pack == policy.logits.may_pack
    await backend.accumulate(batch, LOSS)
    backbone: Any = core.critic.replicas.model.backbone
    assert any(parameter.grad.any() for parameter in backbone.parameters()), "a head of zeros hides the loss from it"
    await backend.step(weight=10.0)
    found = []
    for may_pack in (True, False):
        critic.logits.may_pack = may_pack and critic.logits.may_pack
        found.append(await backend.values(batch))
    assert found[0].any()
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
    await backend.close()


async def test_a_model_that_is_no_critic_of_the_policy_is_refused(policy_path: Path, tmp_path: Path) -> None:
    three = reward_model(tmp_path / "three", labels=3)
    short = reward_model(tmp_path / "short", vocab=60)
    other = reward_model(tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {"a": 68, "b": 67}
    (other / "tokenizer.json").write_text(json.dumps(content))
    encoder = reward_model(tmp_path / "encoder")
    from transformers import BertConfig, BertForSequenceClassification

    made: Any = BertConfig
    BertForSequenceClassification(
        made(
            vocab_size=100,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_labels=1,
        )
    ).save_pretrained(encoder)
    for path, why in (
        (three, "has 3 labels, and a critic has one value"),
        (short, "knows 60 tokens, and the policy in .* has 100"),
        (other, "has another tokenizer than the policy"),
        (encoder, "no head named score"),
        (tmp_path / "nowhere", "critic.path: .*nowhere"),
    ):
        with pytest.raises(ModelNotLoadable, match=why):
            await started(policy_path, path)
