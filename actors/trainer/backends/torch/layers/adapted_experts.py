"""The experts of a layer, with an adapter beside each of their weights.

    hidden [n, H], chosen [n, k] ─▶ pairs of a token and an expert, in the order of the experts
        ─ W x + scale · B (A x), each by its expert ─▶ pairs, weighed and added to [n, H]

PEFT adds B A to the weights of all experts before it computes: a second copy of them for each layer, and a gradient as
large. Here the products of A and B are of the tokens alone, so what the backward pass keeps is tokens.

The frozen weights are multiplied as transformers does it (``grouped_mm_experts_forward``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from actors.models.adapted_layers import AdaptedWeight
from actors.models.adapter import A, B

_ALIGNED_BYTES: Final = 16
"""CUDA's grouped product wants rows of matrices to begin at multiples of this."""


class AdaptedExperts:
    """The forward pass of ``layer``. ``adapters``: the weights that have one, by key, and the module with A and B.

    ``is_on``: whether adapters take part; else the layer computes as it did.
    """

    def __init__(
        self,
        layer: Any,
        adapters: Mapping[str, tuple[AdaptedWeight, nn.Module]],
        scale: float,
        is_on: Callable[[], bool],
    ) -> None:
        self._layer, self._plain = layer, layer.forward
        self._adapters, self._scale, self._is_on = adapters, scale, is_on

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """As transformers' experts: [n, H] of [n, H], int[n, k] and [n, k]."""
        if not self._is_on():
            return self._plain(hidden, chosen, weights)
        layer = self._layer
        experts, order = torch.sort(chosen.reshape(-1), stable=True)
        ends = torch.searchsorted(experts, torch.arange(layer.num_experts, device=experts.device), right=True).int()
        inner = self._product(hidden[order // chosen.shape[-1]], _first(layer), experts, ends)
        inner = layer._apply_gate(inner) if layer.has_gate else layer.act_fn(inner)  # noqa: SLF001
        pairs = self._product(inner, "down_proj", experts, ends)[torch.argsort(order)]
        weighed = pairs * weights.reshape(-1, 1)
        return weighed.view(*chosen.shape, -1).sum(1).to(hidden.dtype)

    def _product(self, x: Tensor, key: str, experts: Tensor, ends: Tensor) -> Tensor:
        """[pairs, out] of [pairs, in]. ``experts`` int[pairs], sorted; ``ends`` int32[E]: where each expert's end."""
        weight = getattr(self._layer, key)
        y = _grouped(x, weight if self._layer.is_transposed else weight.mT, ends)
        if self._layer.has_bias:
            y = y + getattr(self._layer, f"{key}_bias")[experts]
        if key not in self._adapters:
            return y
        adapted, place = self._adapters[key]
        a, b = adapted.of_experts(getattr(place, A).weight, getattr(place, B).weight)
        more = -a.shape[1] % (_ALIGNED_BYTES // a.element_size())
        a, b = nn.functional.pad(a, (0, 0, 0, more)), nn.functional.pad(b, (0, more)).contiguous()
        return y + self._scale * _grouped(_grouped(x, a.mT, ends), b.mT, ends)


def _first(layer: Any) -> str:
    return "gate_up_proj" if layer.has_gate else "up_proj"


def _grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """[pairs, out] of [pairs, in] and [E, in, out]; by the kernel that transformers takes on this device."""
    from transformers.integrations.moe import _grouped_mm

    return _grouped_mm(x, weights, offs=ends)
