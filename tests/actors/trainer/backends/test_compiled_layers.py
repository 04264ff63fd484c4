"""``trainer.compile``: compiled layers give the numbers of plain ones, few forms are compiled, and what fails is told.

torch traces, splits and differentiates the layers as it always does; C++ is made of them in the long test alone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from actors.models.adapter import AdapterSpec
from actors.trainer.backend import BackendSpec, LossSpec, MicroBatch
from actors.trainer.backends.torch.causal_lm import ResponseLogits, load_model, response_positions
from actors.trainer.backends.torch.layers import compiled_layers as module
from actors.trainer.backends.torch.layers.compiled_layers import FORMS_MAX, compile_layers, compiled_layers
from actors.trainer.backends.torch.torch_backend import TorchBackend
from actors.trainer.errors import ModelNotLoadable
from benchmarks.gpu._long_row import group
from tests.tiny_checkpoint import make_tiny_checkpoint

pytestmark = pytest.mark.filterwarnings(f"ignore:{re.escape(module._LOOKS_AT_GRAD)}")

LIGHT = "aot_eager"
"""Compiles as inductor does, up to the code of kernels."""


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_BACKEND", LIGHT)
    torch._dynamo.reset()
    module._tell.cache_clear()
    logging.getLogger("torch.__trace").disabled = True  # pytest would collect what torch notes of every step
    yield
    torch._dynamo.reset()


def compiled(path: Path, **how: Any) -> ResponseLogits:
    return ResponseLogits(load_model(path, BackendSpec(model_path=path, compile=True, **how)), "cpu")


def is_on(logits: ResponseLogits) -> bool:
    state = compiled_layers(logits.model)
    return state is not None and state.on


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def runs_compiled(result: Tensor) -> bool:
    """Whether compiled code has computed ``result``, by the functions that would differentiate it."""
    seen, todo = set[Any](), [result.grad_fn]
    while todo:
        function = todo.pop()
        if function is None or function in seen:
            continue
        if "CompiledFunction" in function.name():
            return True
        seen.add(function)
        todo += [before for before, _ in function.next_functions]
    return False


async def gradients(path: Path, batches: list[MicroBatch], **how: Any) -> Tensor:
    backend = TorchBackend()
    await backend.start(BackendSpec(model_path=path, **how))
    for batch in batches:
        await backend.accumulate(batch, LossSpec())
    assert backend._core is not None
    logits = backend._core.policy.replicas.members[0].logits
    assert is_on(logits) == bool(how.get("compile"))
    found = backend._core.policy.parameters.grad.clone()
    await backend.close()
    return found


@pytest.mark.long
@pytest.mark.parametrize("how", [{}, {"recompute": "whole"}, {"adapter": AdapterSpec(rank=2, alpha=4.0)}])
async def test_gradients_are_those_of_plain_layers(tmp_path: Path, how: dict[str, Any]) -> None:
    path = make_tiny_checkpoint(tmp_path)
    batches = [group(20, 16, 4)[0], group(600, 30, 8)[0], group(31, 9, 1)[0]]
    wanted = await gradients(path, batches, **how)
    found = await gradients(path, batches, compile=True, **how)
    assert wanted.abs().max() > 0
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.long
async def test_c_plus_plus_of_a_layer_gives_plain_gradients_and_the_same_bits_in_each_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BACKEND", "inductor")
    path, batches = make_tiny_checkpoint(tmp_path), [group(20, 16, 4)[0], group(31, 9, 1)[0]]
    wanted = await gradients(path, batches)
    found = await gradients(path, batches, compile=True)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    torch._dynamo.reset()
    assert torch.equal(await gradients(path, batches, compile=True), found)


@pytest.mark.long
def test_rows_of_other_lengths_run_compiled_and_compile_nothing_more(tmp_path: Path) -> None:
    logits = compiled(make_tiny_checkpoint(tmp_path))
    assert is_on(logits)
    before: int | None = None
    for length in range(20, 60, 2):
        batch = group(length, 7 + length % 5, 3)[0]
        result = logits(batch, response_positions(batch)).logprobs(1.0)[0]
        assert runs_compiled(result)
        before = graphs() if before is None else before
    assert before == graphs() <= FORMS_MAX * 4


@pytest.mark.long
def test_what_is_scored_is_what_is_trained_bit_for_bit(tmp_path: Path) -> None:
    logits = compiled(make_tiny_checkpoint(tmp_path))
    batch = group(20, 16, 4)[0]
    trained = logits(batch, response_positions(batch)).logprobs(1.0)[0]
    before = graphs()
    with torch.no_grad():
        scored = logits(batch, response_positions(batch)).logprobs(1.0)[0]
    assert torch.equal(trained.detach(), scored)
    assert not scored.requires_grad
    assert graphs() == before


@pytest.mark.long
def test_a_frozen_model_runs_compiled(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path)
    before = graphs()
    model = load_model(path, BackendSpec(model_path=path, compile=True)).requires_grad_(False)
    logits = ResponseLogits(model, "cpu")
    batch = group(20, 16, 4)[0]
    with torch.no_grad():
        found = logits(batch, response_positions(batch)).logprobs(1.0)[0]
        plain = ResponseLogits(load_model(path, BackendSpec(model_path=path)), "cpu")
        wanted = plain(batch, response_positions(batch)).logprobs(1.0)[0]
    assert is_on(logits)
    assert graphs() > before
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


class Apart(nn.Module):
    """Adds something that only shows while a graph is made."""

    def __init__(self, inner: nn.Module, wrong: Any) -> None:
        super().__init__()
        self.inner, self.wrong = inner, wrong

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return self.wrong(y) if torch.compiler.is_compiling() else y


def scaled_gradient(y: Tensor) -> Tensor:
    return 2 * y - y.detach()


def no_compiler(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no compiler")


@pytest.mark.long
@pytest.mark.parametrize(
    ("wrong", "backend", "told"),
    [
        (lambda y: y + 0.5, LIGHT, "log-probabilities are up to"),
        (scaled_gradient, LIGHT, "gradients are"),
        (lambda y: y, no_compiler, "no compiler"),
    ],
)
def test_layers_that_compile_to_something_else_or_not_at_all_stay_plain_and_that_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Any, backend: Any, told: str
) -> None:
    monkeypatch.setattr(module, "_BACKEND", backend)
    path = make_tiny_checkpoint(tmp_path)
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            model: Any = load_model(path, BackendSpec(model_path=path, compile=True))
            model.model.layers[1].mlp = Apart(model.model.layers[1].mlp, wrong)
            logits = ResponseLogits(model, "cpu")
            assert not is_on(logits)
    assert len(logs) == 1
    assert told in logs[0]["why"]
    batch = group(20, 16, 4)[0]
    result = logits(batch, response_positions(batch)).logprobs(1.0)[0]
    assert not runs_compiled(result)
    plain = ResponseLogits(load_model(path, BackendSpec(model_path=path)), "cpu")
    wanted = plain(batch, response_positions(batch)).logprobs(1.0)[0]
    assert torch.equal(result, wanted)


@pytest.mark.long
def test_a_form_that_cannot_be_compiled_later_is_computed_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny_checkpoint(tmp_path)
    monkeypatch.setattr(module, "_BACKEND", no_compiler)
    logits = compiled(path)
    state = compiled_layers(logits.model)
    assert state is not None
    module._tell.cache_clear()
    state.on = True  # as if the examples had had other forms
    batch = group(20, 16, 4)[0]
    with structlog.testing.capture_logs() as logs:
        result = logits(batch, response_positions(batch)).logprobs(1.0)[0]
    assert [line["log_level"] for line in logs] == ["warning"]
    plain = ResponseLogits(load_model(path, BackendSpec(model_path=path)), "cpu")
    assert torch.equal(result, plain(batch, response_positions(batch)).logprobs(1.0)[0])


def test_a_model_without_known_layers_is_refused() -> None:
    with pytest.raises(ModelNotLoadable, match=r"trainer\.compile: Linear has no layers.*unset it"):
        compile_layers(nn.Linear(2, 2))
