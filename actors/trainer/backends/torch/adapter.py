"""The model of a job that trains an adapter: its own weights are frozen, the adapter's alone are trained.

    y = W x + scale · B (A x)        adapter off: y = W x, which is the model that it began as

A and B are parameters of the layer that they stand beside. So the flat buffer, gradient sums, optimizer, versions and
parking, which take what is trained, hold the adapter and nothing else.

The frozen weights of one model are in memory once, for all replicas and for all jobs of a training service. They go
with the last model that computes with them, and are no bundle's state.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor, nn

from actors.host.adapted_layers import NoSuchTarget, adapted_layers
from actors.host.adapter import A, AdapterSpec, B
from actors.trainer.backend import BackendSpec
from actors.trainer.backends.torch.causal_lm import load_model
from actors.trainer.errors import ModelNotLoadable


class Switch:
    """Says whether adapters take part; all replicas of a model have one."""

    def __init__(self) -> None:
        self.on = True

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Within the block the model is the one that the adapter began beside. No replica computes as it begins."""
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
    """Holds the frozen weights of a model, by name."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = {name: parameter.data for name, parameter in model.named_parameters()}

    def give_to(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.data = self._tensors[name]


_SHARED: Final[weakref.WeakValueDictionary[tuple[str, ...], _Frozen]] = weakref.WeakValueDictionary()
_LOADING: Final = threading.Lock()


def load_adapted(spec: BackendSpec, adapter: AdapterSpec, switch: Switch, base: str) -> nn.Module:
    """The model of ``spec`` with an adapter that changes nothing yet; the adapter alone asks for gradients.

    ``base``: identity of the model.

    Raises:
        ModelNotLoadable: there is no such model, or it has no such layers.
    """
    model = load_model(spec.model_path, spec).requires_grad_(False)
    key = base, spec.dtype, spec.device
    with _LOADING:
        frozen = _SHARED.get(key)
        if frozen is None:
            frozen = _SHARED[key] = _Frozen(model)
        frozen.give_to(model)
    model.frozen = frozen  # type: ignore[assignment]  as long as the model
    add_adapter(model, adapter, switch, seed=spec.seed)
    return model


def add_adapter(model: nn.Module, adapter: AdapterSpec, switch: Switch, *, seed: int) -> None:
    """Put an adapter that changes nothing yet beside the layers of ``model``, drawn from ``seed``, in their dtype.

    Raises:
        ModelNotLoadable: the model has no such layers.
    """
    try:
        layers = adapted_layers(model, adapter)
    except NoSuchTarget as error:
        raise ModelNotLoadable(str(error)) from error
    draw = torch.Generator().manual_seed(seed)
    for layer in layers.values():
        inner, outer, weight = layer.in_features, layer.out_features, layer.weight
        spread = 1 / math.sqrt(inner)  # that of a linear layer in torch, and of PEFT
        drawn = torch.empty(adapter.rank, inner).uniform_(-spread, spread, generator=draw)
        setattr(layer, A, _Matrix(drawn.to(weight)))
        setattr(layer, B, _Matrix(weight.new_zeros(outer, adapter.rank)))
        layer.forward = _adapted(layer, layer.forward, adapter.scale, switch)


def _adapted(
    layer: nn.Linear, forward: Callable[[Tensor], Tensor], scale: float, switch: Switch
) -> Callable[..., Tensor]:
    a, b = getattr(layer, A), getattr(layer, B)

    def call(x: Tensor) -> Tensor:
        y = forward(x)
        if not switch.on:
            return y
        return y + scale * nn.functional.linear(nn.functional.linear(x, a.weight), b.weight)

    return call
