"""Linear layers of a model, forward and backward by oneDNN, where that is faster (``actors/models/matmul.py``).

y = x Wᵀ + b        dx = g W        dW = gᵀ x        db = Σ g
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from actors.models.matmul import onednn_linear, takes_onednn


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[override]
        """``x`` float32[..., k], ``weight`` float32[n, k]; float32[..., n]."""
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return onednn_linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        flat = grad.reshape(-1, grad.shape[-1])
        by_x = onednn_linear(grad, weight.t()) if needs_x else None
        by_weight = onednn_linear(flat.t(), x.reshape(-1, x.shape[-1]).t()) if needs_weight else None
        return by_x, by_weight, flat.sum(0) if ctx.has_bias and needs_bias else None


def replace_linears(model: nn.Module) -> int:
    """Let every linear layer in ``model`` that gains by it compute by oneDNN; returns how many do."""
    found = [module for module in model.modules() if type(module) is nn.Linear and takes_onednn(module.weight)]
    for module in found:
        module.forward = _forward(module)
    return len(found)


def _forward(module: nn.Linear) -> Any:
    """Look the parameters up at each call: later they become views of one buffer, or are sharded and gathered, perhaps
    on another device and in another dtype.
    """
    own = module.forward

    def call(x: Tensor) -> Tensor:
        if x.dtype == torch.float32 and takes_onednn(module.weight):
            return _Linear.apply(x, module.weight, module.bias)  # type: ignore[no-any-return]
        return own(x)

    return call
