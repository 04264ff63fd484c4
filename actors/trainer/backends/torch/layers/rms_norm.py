"""RMSNorm with a backward pass of its own.

    y = w x / sqrt(mean(x²) + eps)        n = x r,  r = 1 / sqrt(mean(x²) + eps)
    dw = Σ g n                            dx = r (g w − n mean(g w n)),  g the gradient of y

Model code writes the norm as five operations, which autograd differentiates one by one: in a small model that makes a
training step a tenth longer. Here the forward pass keeps ``n`` and ``r``, and the backward pass is the formula above
(Zhang and Sennrich 2019, Root Mean Square Layer Normalization, section 4).

Invariants
- A module is replaced only when it computes exactly this: its own result on an example is compared first. Norms that
  differ (1 + w, a cast in between) stay as they are.
- Float32 only, checked at each call, since a model with float32 weights may get inputs of lower precision. Then its own
  code runs, which rounds between the operations, at places that differ between models.
- The weight is looked up at each call: sharding puts other tensors in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_TOLERANCE = 1e-5
"""Tolerance of the comparison; float32 sums in another order differ by about 1e-6."""


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        """``x`` float32[..., h], ``weight`` float32[h]; float32[..., h]."""
        square_mean = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = square_mean.add_(eps).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        normed, scale, weight = ctx.saved_tensors
        width = normed.shape[-1]
        by_weight = (grad * normed).reshape(-1, width)
        mean = by_weight.mv(weight).div_(width).reshape(scale.shape)
        return (grad * weight).addcmul_(normed, mean, value=-1.0).mul_(scale), by_weight.sum(0), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x²) + eps)`` over the last dimension. float32[..., h]."""
    return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-any-return]


def replace_rms_norms(model: nn.Module) -> int:
    """Let every norm in ``model`` that computes exactly this use ``rms_norm``; returns how many do."""
    found = [module for module in model.modules() if _is_ours(module)]
    for module in found:
        module.forward = _forward(module, float(module.variance_epsilon))  # type: ignore[assignment, arg-type]
    return len(found)


def _forward(module: nn.Module, eps: float) -> Callable[[Tensor], Tensor]:
    own = module.forward

    def call(x: Tensor) -> Tensor:
        weight: Any = module.weight
        if x.dtype == weight.dtype == torch.float32:
            return rms_norm(x, weight, eps)
        return own(x)

    return call


def _is_ours(module: nn.Module) -> bool:
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not isinstance(eps, float):
        return False
    if weight.dtype != torch.float32 or next(module.children(), None) is not None:
        return False
    return _agrees(module, weight, eps)


def _agrees(module: nn.Module, weight: nn.Parameter, eps: float) -> bool:
    """Compare on weights that differ from each other and from 1, so that nothing agrees by chance."""
    example = torch.linspace(-2.0, 3.0, 3 * weight.numel(), device=weight.device).reshape(3, -1)
    with torch.no_grad():
        own = weight.clone()
        weight.copy_(torch.linspace(0.5, 1.5, weight.numel()))
        try:
            expected = module(example)
            return isinstance(expected, Tensor) and torch.allclose(
                expected, rms_norm(example, weight, eps), rtol=_TOLERANCE, atol=_TOLERANCE
            )
        finally:
            weight.copy_(own)
