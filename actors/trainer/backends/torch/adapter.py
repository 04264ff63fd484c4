"""The model of a job that trains an adapter: the model's own weights are frozen, only the adapter's are trained.

    y = W x + scale · B (A x)        adapter off: y = W x, the original model

A and B are parameters of the model, at their places beside the weights that they adapt (``adapted_layers.py``). So the
flat buffer, gradient sums, optimizer, versions and parking, which take trained parameters, hold the adapter and nothing
else.

The frozen weights of one model are in memory once, for all replicas and for all jobs of a training service. They are
freed with the last model that computes with them, and belong to no bundle's state.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from actors.models.adapted_layers import AdaptedWeight, NoSuchTarget, adapted_layers
from actors.models.adapter import A, AdapterSpec, B
from actors.trainer.backend import BackendSpec
from actors.trainer.backends.torch.causal_lm import load_model
from actors.trainer.backends.torch.layers.adapted_experts import AdaptedExperts
from actors.trainer.backends.torch.layers.adapted_linear import adapt
from actors.trainer.backends.torch.layers.four_bits import Packed, pack_linears, use_packed
from actors.trainer.errors import ModelNotLoadable

_EXAMPLE: Final = (2, 12)
"""Rows and tokens of the example on which experts are checked."""


class Switch:
    """Says whether adapters take part; all replicas of a model share one switch."""

    def __init__(self) -> None:
        self.on = True

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Compute without the adapter within the block. No replica may be computing when the block begins."""
        self.on = False
        try:
            yield
        finally:
            self.on = True


class _Matrix(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


class _Frozen:
    """Holds the frozen weights of a model, by name. ``packed``: those of layers that are in 4 bits."""

    def __init__(self, model: nn.Module, packed: dict[str, Packed]) -> None:
        self._tensors = {name: parameter.data for name, parameter in model.named_parameters()}
        self._packed = packed

    def give_to(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.data = self._tensors[name]
        use_packed(model, self._packed)


_SHARED: Final[weakref.WeakValueDictionary[tuple[str, ...], _Frozen]] = weakref.WeakValueDictionary()
_LOADING: Final = threading.Lock()


def load_adapted(spec: BackendSpec, adapter: AdapterSpec, switch: Switch, base: str) -> nn.Module:
    """The model of ``spec`` with an adapter that changes nothing yet; only the adapter gets gradients.

    ``base``: identity of the model.

    Raises:
        ModelNotLoadable: there is no such model, it lacks the layers that ``adapter`` names, or it is to be kept in 4
            bits and was not rounded to them.
    """
    packed: dict[str, Packed] = {}

    def pack(model: nn.Module) -> None:
        packed.update(pack_linears(model, getattr(torch, spec.dtype), spec.device))

    model = load_model(spec.model_path, spec, pack if adapter.quantization == "nf4" else None).requires_grad_(False)
    key = base, spec.dtype, spec.device, adapter.quantization
    with _LOADING:
        frozen = _SHARED.get(key)
        if frozen is None:
            frozen = _SHARED[key] = _Frozen(model, packed)
        frozen.give_to(model)
    model.frozen = frozen  # type: ignore[assignment]  keeps them as long as the model
    add_adapter(model, adapter, switch, seed=spec.seed)
    return model


def add_adapter(model: nn.Module, adapter: AdapterSpec, switch: Switch, *, seed: int) -> None:
    """Put an adapter that changes nothing yet beside the layers of ``model``, drawn from ``seed``, in their dtype.

    Raises:
        ModelNotLoadable: the model lacks the layers that ``adapter`` names, or its experts compute in a way of their
            own.
    """
    try:
        layers = adapted_layers(model, adapter)
    except NoSuchTarget as error:
        raise ModelNotLoadable(str(error)) from error
    draw = torch.Generator().manual_seed(seed)
    of_experts: dict[int, dict[str, tuple[AdaptedWeight, nn.Module]]] = {}
    for place, layer in layers.items():
        beside = _add_matrices(model, place, layer, adapter.rank, draw)
        if layer.experts:
            of_experts.setdefault(id(layer.owner), {})[layer.key] = layer, beside
        else:
            adapt(layer.owner, adapter.scale, lambda: switch.on)
    for adapters in of_experts.values():
        owner = next(iter(adapters.values()))[0].owner
        owner.forward = AdaptedExperts(owner, adapters, adapter.scale, lambda: switch.on)
    if of_experts:
        _check_experts(model, switch)


def _add_matrices(model: nn.Module, place: str, layer: AdaptedWeight, rank: int, draw: torch.Generator) -> nn.Module:
    """Give the module at ``place``, which is made where the model has none, its A and B; returns it."""
    beside: nn.Module = model
    for part in place.split("."):
        if not hasattr(beside, part):
            beside.add_module(part, nn.Module())
        beside = getattr(beside, part)
    (wide, inner), b_shape = layer.shapes(rank)
    spread = 1 / math.sqrt(inner)  # as in a new linear layer of torch, and in PEFT
    drawn = torch.empty(wide, inner).uniform_(-spread, spread, generator=draw)
    setattr(beside, A, _Matrix(drawn.to(layer.weight)))
    setattr(beside, B, _Matrix(layer.weight.new_zeros(b_shape)))
    return beside


def _check_experts(model: Any, switch: Switch) -> None:
    """Experts are computed by functions of ours: on an example, an adapter that changes nothing must change nothing."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, model.config.vocab_size, _EXAMPLE)).to(model.device)
    with torch.no_grad():
        adapted = model(input_ids=ids, use_cache=False).logits.float()
        with switch.off():
            own = model(input_ids=ids, use_cache=False).logits.float()
    apart = float((own - adapted).abs().max() / own.abs().max().clamp(min=1.0))
    if not apart < (1e-3 if model.dtype == torch.float32 else 0.1):
        raise ModelNotLoadable(
            f"model.adapter.targets: an adapter that changes nothing moves the logits of {type(model).__name__} by "
            f"{apart:.2g}: its experts compute in a way of their own. Adapt other layers, or train the whole model "
            "(without model.adapter)"
        )
