"""Linear layers that oneDNN computes give the model's own values and gradients, and are put in only where they gain."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from actors.models import matmul
from actors.trainer.backends.torch.layers.fast_linear import replace_linears

IN, OUT = 512, 256


@pytest.fixture(autouse=True)
def on_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "onednn_is_faster", lambda: True)


def results(layer: nn.Linear, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    (y * torch.linspace(-1.0, 1.0, y.numel()).reshape(y.shape)).sum().backward()
    return [y.detach(), *(part.grad.clone() for part in (x, *layer.parameters()) if part.grad is not None)]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [(5,), (2, 7)])
def test_values_and_gradients_are_those_of_the_layer_itself(rows: tuple[int, ...], biased: bool) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(IN, OUT, bias=biased), torch.randn(*rows, IN)
    expected = results(layer, x)
    assert replace_linears(layer) == 1
    ours = results(layer, x)
    assert len(ours) == len(expected) == 3 + biased
    for own, other in zip(expected, ours, strict=True):
        torch.testing.assert_close(other, own, rtol=1e-4, atol=1e-4)


def test_gradients_are_added_to_what_is_there_and_weights_may_move() -> None:
    """The backend lays all parameters into one buffer after the layers were replaced, and sums up in place."""
    torch.manual_seed(0)
    layer, x = nn.Linear(IN, OUT, bias=False), torch.randn(3, IN)
    replace_linears(layer)
    layer.weight.data = torch.ones(OUT, IN)
    sums = layer.weight.grad = torch.ones(OUT, IN)
    y = layer(x)
    y.sum().backward()
    torch.testing.assert_close(y, x.sum(1, keepdim=True).expand(-1, OUT), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(sums, 1.0 + x.sum(0).expand(OUT, -1), rtol=1e-4, atol=1e-4)


def test_a_frozen_layer_gives_no_gradient_and_small_and_derived_layers_stay_as_they_are() -> None:
    class Own(nn.Linear):
        pass

    assert replace_linears(nn.Sequential(nn.Linear(96, 96), Own(IN, OUT))) == 0
    layer = nn.Linear(IN, OUT).requires_grad_(False)
    assert replace_linears(layer) == 1
    assert not layer(torch.ones(1, IN)).requires_grad
