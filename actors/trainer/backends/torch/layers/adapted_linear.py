"""A linear layer with an adapter beside it: y = W x + (scale · x Aᵀ) Bᵀ.

The adapter's part is two thin products, the first of which may be asked for alone: who computes y in blocks, as the
output embedding is (``blocked_head.py``), adds the second to each block.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.functional import linear

from actors.models.adapter import A, B


class AdaptedLinear:
    """The forward pass of ``layer``, which has A and B beside its weight; ``own``: the one that it had without them.

    ``is_on``: whether the adapter takes part; else the layer computes as it did.
    """

    def __init__(
        self, layer: nn.Module, own: Callable[[Tensor], Tensor], scale: float, is_on: Callable[[], bool]
    ) -> None:
        self._a, self._b = getattr(layer, A), getattr(layer, B)
        self._own, self._scale, self._is_on = own, scale, is_on

    def __call__(self, x: Tensor) -> Tensor:
        """The layer's answer [..., out] to ``x`` [..., in]."""
        low, up = self.factors(x)
        y = self._own(x)
        return y if low is None or up is None else y + linear(low, up)

    def factors(self, x: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """What the adapter adds to the answer to ``x`` is ``low`` [..., rank] times ``up`` [out, rank] transposed."""
        if not self._is_on():
            return None, None
        return self._scale * linear(x, self._a.weight), self._b.weight
