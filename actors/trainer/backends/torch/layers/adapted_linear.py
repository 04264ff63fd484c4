"""A linear layer with an adapter beside it: y = W x + (scale · x Aᵀ) Bᵀ.

The adapter's part is two thin products, of which the first may be asked for alone: who computes y in blocks, as the
output embedding is (``blocked_head.py``), adds the second to each block.

Functions in place of objects: torch.compile takes one piece of code for all layers then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor
from torch.nn.functional import linear

from actors.models.adapter import A, B

Factors = Callable[[Tensor], tuple[Tensor, Tensor] | tuple[None, None]]
"""Function from x [..., in] to ``low`` [..., rank] and ``up`` [out, rank]: to y the adapter adds low times up
transposed. Two times None while it takes no part."""
_FACTORS: Final = "adapter_factors"


def adapt(layer: Any, scale: float, is_on: Callable[[], bool]) -> None:
    """Let ``layer``, which has A and B beside its weight, add what they make while ``is_on``."""
    own, a, b = layer.forward, getattr(layer, A), getattr(layer, B)

    def factors(x: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
        return (scale * linear(x, a.weight), b.weight) if is_on() else (None, None)

    def forward(x: Tensor) -> Tensor:
        low, up = factors(x)
        y = own(x)
        return y if low is None or up is None else y + linear(low, up)

    layer.forward = forward
    setattr(layer, _FACTORS, factors)


def factors_of(layer: Any) -> Factors | None:
    """The factors of the adapter that ``adapt`` has given ``layer``; None: it has none."""
    return getattr(layer, _FACTORS, None)
