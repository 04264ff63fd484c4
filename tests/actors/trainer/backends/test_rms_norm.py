"""The norm that is computed our own way gives the model's own values and gradients, and is put in nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from actors.trainer.backends.torch.layers.rms_norm import replace_rms_norms, rms_norm


def norm_of(width: int) -> nn.Module:
    norm = Qwen3RMSNorm(width)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-0.5, 2.0, width))
    return norm


def results(norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = x.clone().requires_grad_()
    norm.zero_grad()
    y = norm(x)
    (y * torch.linspace(-1.0, 1.0, y.numel()).reshape(y.shape)).sum().backward()
    assert x.grad is not None and isinstance(norm.weight, Tensor) and norm.weight.grad is not None
    return y.detach(), x.grad, norm.weight.grad.clone()


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8), (2, 3, 4, 8)])
def test_values_and_gradients_are_those_of_the_models_own_norm(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    norm, x = norm_of(8), torch.randn(shape)
    expected = results(norm, x)
    assert replace_rms_norms(norm) == 1
    for own, ours in zip(expected, results(norm, x), strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-6)


def test_the_gradient_passes_a_finite_difference_check() -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 6), (6,)))
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-6), (x, weight))


def test_putting_it_in_leaves_the_weights_as_they_were() -> None:
    norm = norm_of(8)
    before = norm.state_dict()["weight"].clone()
    replace_rms_norms(norm)
    assert torch.equal(norm.state_dict()["weight"], before)


class Plain(nn.Module):
    """Its weight is there and not used: equal to ours for as long as it is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


@pytest.mark.parametrize("norm", [Gemma2RMSNorm(8), nn.LayerNorm(8), Plain(), Qwen3RMSNorm(8).to(torch.bfloat16)])
def test_a_norm_that_computes_something_else_stays_as_it_is(norm: nn.Module) -> None:
    assert replace_rms_norms(norm) == 0
    assert "forward" not in vars(norm)
