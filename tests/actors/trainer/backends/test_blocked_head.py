"""Log-probabilities from a head in blocks: the same as from whole logits, for every kind of model, or whole logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from structlog.testing import capture_logs
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call

from actors.models.adapter import AdapterSpec
from actors.trainer.backend import BackendSpec, LossSpec, MicroBatch
from actors.trainer.backends.torch.adapter import Switch, add_adapter
from actors.trainer.backends.torch.causal_lm import ResponseLogits, load_model, response_positions
from actors.trainer.backends.torch.flat import FlatParameters
from actors.trainer.backends.torch.layers import blocked_head
from actors.trainer.backends.torch.layers.blocked_head import readings
from actors.trainer.backends.torch.replicas import Replica
from actors.trainer.learning.samples import pad
from actors.trainer.learning.token_logprobs import Reading, TokenLogprobs
from benchmarks.gpu._model_family import make_model
from tests.actors.trainer.random_samples import random_sample
from tests.tiny_checkpoint import make_tiny_checkpoint

CLOSE = 1e-5
"""Relative to the largest gradient of a parameter."""
CAPPED = {"final_logit_softcapping": 3.0}
HYBRID = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "head_dim": 8}
SCALED: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {**CAPPED, "head_dim": 8},
    "gemma3_text": {**CAPPED, "head_dim": 8},
    "nanochat": CAPPED,
    "recurrent_gemma": {"logits_soft_cap": 3.0, "head_dim": 8, "lru_width": 32},
    "cohere": {"logit_scale": 0.2},
    "granite": {"logits_scaling": 3.0},
    "hyperclovax": {"logits_scaling": 0.3},
    "minicpm3": {"dim_model_base": 16, "num_key_value_heads": 4, "head_dim": 8},
    "falcon_h1": {"lm_head_multiplier": 0.25, **HYBRID},
}
"""Families that do nothing with their logits, cap them, multiply them, divide them, or scale what the head is given."""


ADAPTER = AdapterSpec(rank=3, alpha=6.0, targets=("q_proj", "lm_head"))


@pytest.fixture(autouse=True)
def few_rows_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven blocks or so, of which two are kept, and people are told what they were told before."""
    monkeypatch.setattr(TokenLogprobs, "BLOCK_BYTES", 1600)
    monkeypatch.setattr(TokenLogprobs, "KEPT_ELEMENTS", 850)
    monkeypatch.setattr(TokenLogprobs, "ELEMENTS", 300)
    blocked_head._tell.cache_clear()


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def some_batch(seed: int = 0) -> MicroBatch:
    rng = np.random.default_rng(seed)
    return pad([random_sample(rng, n // 3, n % 3, rng.integers(3, 90, 4).astype(np.int32), 7) for n in range(4)])


def loaded(path: Path, dtype: str = "float32", **changes: Any) -> Any:
    return load_model(path, BackendSpec(model_path=path, dtype=dtype, **changes))


def adapted(path: Path) -> Any:
    """The frozen model with an adapter of its head and of a layer below, which moves its logits."""
    model = loaded(path).requires_grad_(False)
    add_adapter(model, ADAPTER, Switch(), seed=0)
    torch.manual_seed(1)
    for name, own in model.named_parameters():
        if name.endswith("lora_B.weight"):
            own.data.normal_(std=0.3)
    return model


def family(name: str, special: dict[str, Any], directory: Path) -> Path:
    make_model(name, {**special, "vocab_size": 100}, directory)
    return directory


def answered(logits: ResponseLogits, temperature: float = 1.0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Log-probabilities, entropies and the gradients of a mixture of both."""
    batch = some_batch()
    logits.model.zero_grad(set_to_none=True)
    logprobs, entropies = logits(batch, response_positions(batch)).logprobs(temperature, learns_entropy=True)
    mixture(logprobs, entropies).backward()  # type: ignore[no-untyped-call]
    found = {name: own.grad for name, own in logits.model.named_parameters()}
    return logprobs.detach(), entropies.detach(), {name: g for name, g in found.items() if g is not None}


def mixture(logprobs: Tensor, entropies: Tensor) -> Tensor:
    weight = torch.linspace(-1.0, 2.0, len(logprobs))
    return (logprobs * weight).sum() + (entropies * weight.flip(0)).sum()


def from_dense_weights(path: Path, model: Any, temperature: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """As ``answered``, from the bare model with W + scale · B A in place of each W that ``model`` adapts."""
    own = {name: part.detach().requires_grad_() for name, part in model.named_parameters() if part.requires_grad}
    layers = dict.fromkeys(name.removesuffix(".lora_A.weight").removesuffix(".lora_B.weight") for name in own)
    dense = {
        f"{layer}.weight": model.get_submodule(layer).weight
        + ADAPTER.scale * own[f"{layer}.lora_B.weight"] @ own[f"{layer}.lora_A.weight"]
        for layer in layers
    }
    ids = torch.from_numpy(some_batch().input_ids.astype(np.int64))
    where = torch.from_numpy(response_positions(some_batch()))
    inputs = {"input_ids": ids, "use_cache": False}
    logits = functional_call(loaded(path), dense, kwargs=inputs, tie_weights=False).logits
    logs = torch.log_softmax(logits[:, :-1][where[:, 1:]] / temperature, dim=-1)
    logprobs, entropies = logs.gather(-1, ids[where][:, None])[:, 0], -(logs.exp() * logs).sum(-1)
    mixture(logprobs, entropies).backward()  # type: ignore[no-untyped-call]
    return logprobs.detach(), entropies.detach(), {n: p.grad for n, p in own.items() if p.grad is not None}


def whole(logits: ResponseLogits) -> ResponseLogits:
    """The same model, from now on from whole logits."""
    assert logits.blocked_head is not None
    logits.blocked_head.by_blocks = False
    return logits


def takes_blocks(model: Any) -> bool:
    head = ResponseLogits(model, "cpu").blocked_head
    return head is not None and head.by_blocks


def assert_same(
    ours: tuple[Tensor, Tensor, dict[str, Tensor]], other: tuple[Tensor, Tensor, dict[str, Tensor]]
) -> None:
    for one, two in zip(ours[:2], other[:2], strict=True):
        torch.testing.assert_close(one, two, rtol=CLOSE, atol=CLOSE)
    assert ours[2].keys() == other[2].keys()
    largest = max(float(gradient.abs().max()) for gradient in other[2].values())
    for name, gradient in other[2].items():
        apart = float((ours[2][name] - gradient).abs().max())
        assert apart <= CLOSE * max(float(gradient.abs().max()), 1e-3 * largest), name


# ------------------------------------------------------------ the function


@pytest.mark.parametrize("learns_entropy", [False, True])
@pytest.mark.parametrize(
    ("temperature", "scale", "cap"), [(1.0, 1.0, 0.0), (0.7, 1.0, 0.0), (1.0, 0.25, 0.0), (1.3, 0.5, 4.0)]
)
def test_blocks_give_what_torch_gives_from_whole_logits(
    temperature: float, scale: float, cap: float, learns_entropy: bool
) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(23, 16, requires_grad=True), torch.randn(61, 16, requires_grad=True)
    rows, targets = torch.randint(0, 23, (40,)), torch.randint(0, 61, (40,))
    pull, spread = torch.randn(2, 40)
    reading = Reading(temperature=temperature, learns_entropy=learns_entropy, scale=scale, cap=cap)
    logprobs, entropies = TokenLogprobs.apply(hidden, weight, rows, targets, reading)  # type: ignore[misc]
    z = scale * hidden @ weight.T
    full = torch.log_softmax((cap * torch.tanh(z / cap) if cap else z) / temperature, dim=-1)[rows]
    wanted, entropy = full.gather(-1, targets[:, None])[:, 0], -(full.exp() * full).sum(-1)
    torch.testing.assert_close((logprobs, entropies), (wanted, entropy))
    both = [
        (p * pull).sum() + ((e * spread).sum() if learns_entropy else 0)
        for p, e in ((logprobs, entropies), (wanted, entropy))
    ]
    for ours, other in zip(*(torch.autograd.grad(total, [hidden, weight]) for total in both), strict=True):
        assert float((ours - other).abs().max()) <= CLOSE * float(other.abs().max())


def test_the_gradient_of_a_weight_is_added_to_its_sum_and_is_nowhere_else() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(23, 16), torch.randn(61, 16, requires_grad=True)
    rows, targets, total = torch.arange(23), torch.randint(0, 61, (23,)), torch.ones(61, 16)
    for reading in (Reading(), Reading(gradient_into=total)):
        TokenLogprobs.apply(hidden, weight, rows, targets, reading)[0].sum().backward()  # type: ignore[index]
    assert weight.grad is not None
    torch.testing.assert_close(total, weight.grad + 1.0)


@pytest.mark.parametrize("rank", [0, 3])
def test_what_is_kept_for_the_backward_pass_is_as_much_however_many_rows_there_are(rank: int) -> None:
    """Beside the function's arguments, among which are an adapter's two."""
    kept: list[int] = []
    for count in (40, 444):
        sizes: list[int] = []
        hidden, weight = torch.randn(count, 5, requires_grad=True), torch.randn(100, 5)
        both = (torch.randn(count, rank), torch.randn(100, rank)) if rank else ()
        targets = torch.zeros(count, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.append(t.numel()) or t, lambda t: t):
            TokenLogprobs.apply(hidden, weight, torch.arange(count), targets, Reading(), *both)
        given = {one.numel() for one in (hidden, weight, targets, *both)}
        kept.append(sum(size for size in sizes if size not in given))
    assert kept == [800, 800]


# ------------------------------------------------------------ models


@pytest.mark.parametrize("name", SCALED)
def test_a_family_is_computed_in_blocks_as_from_its_own_logits(tmp_path: Path, name: str) -> None:
    logits = ResponseLogits(loaded(family(name, SCALED[name], tmp_path)), "cpu")
    assert logits.blocked_head is not None and logits.blocked_head.by_blocks
    assert_same(answered(logits, 0.8), answered(whole(logits), 0.8))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
def test_tied_weights_get_the_gradients_of_both_their_uses(tmp_path: Path, tied: bool, recomputed: bool) -> None:
    path = make_tiny_checkpoint(tmp_path, tied=tied)
    logits = ResponseLogits(loaded(path, recompute="whole" if recomputed else "none"), "cpu")
    assert logits.blocked_head is not None and logits.blocked_head.by_blocks
    assert_same(answered(logits), answered(whole(logits)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cap_that_is_forgotten_is_found_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Also one of 30, far above the logits of random weights, which nothing shows until the model has learned."""
    path = family("gemma2", {"final_logit_softcapping": 30.0, "head_dim": 8}, tmp_path)
    model = loaded(path, dtype)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.01)
    assert takes_blocks(model)
    monkeypatch.setattr(blocked_head, "readings", lambda _: iter([Reading()]))
    model = loaded(path, dtype)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.01)
    with capture_logs() as told:
        assert not takes_blocks(model)
    assert "nats off" in told[0]["why"]


def test_a_model_that_changes_its_logits_in_an_unknown_way_is_computed_from_whole_logits_and_people_are_told(
    tmp_path: Path,
) -> None:
    model = loaded(make_tiny_checkpoint(tmp_path))
    own = model.forward

    def forward(**inputs: Any) -> Any:
        output = own(**inputs)
        output.logits = output.logits - 0.01 * output.logits.square()
        return output

    model.forward = forward
    with capture_logs() as told:
        logits = ResponseLogits(model, "cpu")
    assert [(line["log_level"], line["model"]) for line in told] == [("warning", "Qwen3ForCausalLM")]
    assert "nats off" in told[0]["why"]
    batch = some_batch()
    where = response_positions(batch)
    asked = logits(batch, where)
    raw = asked.logits
    expected = torch.log_softmax(raw, -1)[asked.rows, asked.targets]
    torch.testing.assert_close(asked.logprobs(1.0)[0], expected)


def test_a_head_with_a_bias_takes_whole_logits_and_people_are_told_once(tmp_path: Path) -> None:
    path = family("phi", {"num_key_value_heads": 4}, tmp_path)
    with capture_logs() as told:
        assert not takes_blocks(loaded(path)) and not takes_blocks(loaded(path))
    assert [line["why"] for line in told] == ["its head has a bias"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "granite", "phi"])
def test_a_head_with_an_adapter_gives_the_gradients_of_dense_weights_and_whole_logits(
    tmp_path: Path, name: str, tied: bool
) -> None:
    """Of A and B, and of an adapter below, which hidden states lead to; phi's head has a bias, and takes no blocks."""
    special = SCALED.get(name, {"num_key_value_heads": 4})
    path = family(name, {**special, "tie_word_embeddings": tied}, tmp_path)
    model = adapted(path)
    wanted = from_dense_weights(path, model, 0.8)
    logits = ResponseLogits(model, "cpu")
    assert logits.blocked_head is not None and logits.blocked_head.by_blocks == (name != "phi")
    found = answered(logits, 0.8)
    assert {"lm_head.lora_A.weight", "lm_head.lora_B.weight"} < found[2].keys()
    assert_same(found, wanted)


def test_a_head_with_an_unknown_adapter_takes_whole_logits(tmp_path: Path) -> None:
    model = loaded(make_tiny_checkpoint(tmp_path, tied=False))
    model.lm_head.lora_A = torch.nn.Linear(32, 2, bias=False)
    with capture_logs() as told:
        assert not takes_blocks(model)
    assert told[0]["why"] == "its head has parts of its own"


def test_between_questions_the_head_gives_logits(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path)
    ids = torch.tensor([[5, 9, 11]])
    plain, asked = loaded(path), loaded(path)
    answered(ResponseLogits(asked, "cpu"))
    assert torch.equal(plain(input_ids=ids).logits, asked(input_ids=ids).logits)


# ------------------------------------------------------------ sums, ranks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_of_the_head_is_summed_in_float32_also_where_backward_passes_add_in_half_precision(
    tmp_path: Path, dtype: str
) -> None:
    model = loaded(make_tiny_checkpoint(tmp_path, tied=False, architecture="llama"), dtype)
    flat = FlatParameters(model)
    (sums,) = flat.sums
    batch = some_batch()
    batch = type(batch)(
        **{
            **{f: getattr(batch, f) for f in batch.__dataclass_fields__},
            "loss_weight": response_positions(batch).astype(np.float32),
        }
    )
    replica = Replica(model, "cpu", sums)
    logprobs, _ = replica.logits(batch, response_positions(batch)).logprobs(1.0)
    logprobs.sum().backward()  # type: ignore[no-untyped-call]
    total = sums.of(model.lm_head.weight)
    assert total is not None and total.dtype == torch.float32 and bool((total != 0).any())
    assert (dtype == "float32") == bool((model.lm_head.weight.grad != 0).any())
    assert bool((model.model.embed_tokens.weight.grad != 0).any())
    before = total.clone()
    replica.accumulate(batch, LossSpec())
    assert not torch.equal(total, before)
    sums.zero()
    assert not bool(total.any())


@pytest.mark.parametrize(
    ("name", "load"),
    [("llama", loaded), ("gemma2", loaded), ("cohere", loaded), ("llama", adapted), ("cohere", adapted)],
)
@pytest.mark.usefixtures("world_of_one")
def test_a_sharded_head_gives_the_gradients_of_whole_logits(
    tmp_path: Path, name: str, load: Callable[[Path], Any]
) -> None:
    """Its weight is freed between the passes: the backward pass has to have it gathered again."""
    path = family(name, {**SCALED[name], "tie_word_embeddings": name != "llama"}, tmp_path)
    expected = answered(whole(ResponseLogits(load(path), "cpu")))
    model = load(path)
    how: dict[str, Any] = {"reshard_after_forward": True, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    for layer in model.model.layers:
        fully_shard(layer, **how)
    fully_shard(model, **how)
    logits = ResponseLogits(model, "cpu")
    assert logits.blocked_head is not None and logits.blocked_head.by_blocks
    logprobs, entropies, gradients = answered(logits)
    whole_gradients = {name: gradient.full_tensor() for name, gradient in gradients.items()}  # type: ignore[attr-defined]
    assert_same((logprobs, entropies, whole_gradients), expected)


def test_readings_name_each_scale_once() -> None:
    class Config:
        final_logit_softcapping, logits_scaling = None, 4.0

        def get_text_config(self) -> Config:
            return self

    assert [(r.scale, r.cap) for r in readings(Config())] == [(0.25, 0.0), (4.0, 0.0), (1.0, 0.0)]
