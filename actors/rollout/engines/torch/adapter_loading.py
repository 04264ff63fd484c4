"""Putting a version that is an adapter into a live torch module: its layers become W + scale · B A.

    W kept from the start ─▶ copied back ─▶ + scale · B A        so version 100 is what it would be as the first one

Merged, a token costs no more than without an adapter; the price is a second copy of the adapted matrices. In bfloat16
the sum is rounded once, so engine and trainer differ by the rounding of a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from actors.host.adapter import AdapterSpec, tensor_names
from actors.rollout.engine import WeightTensors
from actors.rollout.engines.adapter_tensors import AdapterTensors
from actors.rollout.engines.torch.weight_loading import as_tensor


class AdaptedWeights:
    """Keeps the own weights of a model's adapted layers. Made once parameters have the storage that they stay in."""

    def __init__(self, model: Any, spec: AdapterSpec) -> None:
        self._expected = AdapterTensors.of_model(model, spec, str(model.dtype).removeprefix("torch."))
        self._own = {name: layer.weight.detach().clone() for name, layer in self._expected.layers.items()}

    def verify(self, tensors: WeightTensors, dtypes: Mapping[str, str]) -> None:
        """Raises WeightsMismatch if ``tensors`` are not those of such an adapter."""
        self._expected.check(tensors, dtypes)

    @torch.no_grad()
    def load(self, tensors: WeightTensors) -> None:
        """Put verified ``tensors`` in place."""
        for name, own in self._own.items():
            weight = self._expected.layers[name].weight
            a, b = (as_tensor(tensors[key], weight.dtype).to(weight.device) for key in tensor_names(name))
            weight.copy_(own).addmm_(b, a, alpha=self._expected.spec.scale)
