"""Loads a new policy version into a live torch module, all or nothing, and frees the module's memory for a sleep.

Invariants
- Names, shapes and dtypes are checked before the first byte is written.
- Parameters keep their storage, so views (fused matrices, tied embeddings) see the new values.
- A tied parameter may come under any of its names; each distinct parameter must come at least once.
- A version that is an adapter sets the layers to W + scale · B A, with a W that was kept before the first adapter: so
  no version depends on the ones before. Merged, a token costs no more than without an adapter; the price is a second
  copy of the adapted matrices. An output embedding with an adapter is no longer tied to the input's, which is then
  that copy. In bfloat16 the sum is rounded once, so engine and trainer differ by the rounding of a
  weight.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.models.adapted_layers import AdaptedWeight, untie
from actors.models.adapter import AdapterSpec, tensor_names
from actors.rollout.engine import WeightTensors
from actors.rollout.engines.adapter_tensors import AdapterTensors
from actors.rollout.errors import WeightsMismatch

_NUMPY_OF = {"bfloat16": "uint16"}
"""dtype that numpy lacks → dtype of the array that carries its bits."""


def verify_weights(model: torch.nn.Module, tensors: WeightTensors, dtypes: Mapping[str, str]) -> None:
    """Check names, shapes and dtypes against ``model``.

    Raises:
        WeightsMismatch: names some of the tensors that are unknown, missing, or of another shape or dtype.
    """
    named = _tensors_of(model)
    if unknown := [name for name in tensors if name not in named]:
        raise WeightsMismatch(f"{len(unknown)} tensors are not parameters of this model: {_some(unknown)}")
    given = {id(named[name]) for name in tensors}
    parameters = model.named_parameters(remove_duplicate=False)
    if missing := [name for name, parameter in parameters if id(parameter) not in given]:
        raise WeightsMismatch(f"{len(missing)} parameters are missing from the version: {_some(missing)}")
    for name, array in tensors.items():
        parameter = named[name]
        want = str(parameter.dtype).removeprefix("torch.")
        if tuple(array.shape) != tuple(parameter.shape):
            raise WeightsMismatch(f"{name} has shape {tuple(array.shape)}, the model's is {tuple(parameter.shape)}")
        have = dtypes.get(name, str(array.dtype))
        if have != want or array.dtype.name != _NUMPY_OF.get(want, want):
            raise WeightsMismatch(
                f"{name} is {have} in {array.dtype} words, the model's is {want}: train and serve in one dtype"
            )


def copy_weights(model: torch.nn.Module, tensors: WeightTensors) -> None:
    """Copy verified ``tensors`` into ``model`` in place."""
    named = _tensors_of(model)
    with torch.no_grad():
        for name, array in tensors.items():
            named[name].copy_(as_tensor(array, named[name].dtype))


def _tensors_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters, which a version must hold, and buffers, which it may hold, under all their names."""
    return dict(model.named_buffers()) | dict(model.named_parameters(remove_duplicate=False))


def as_tensor(array: np.ndarray[Any, Any], dtype: torch.dtype) -> Tensor:
    """``array`` as a tensor of ``dtype``, not copied and only to be read; bfloat16 comes as ``uint16``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of read-only arrays, such as maps of shared memory
        tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.view(dtype) if tensor.dtype != dtype else tensor


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


class AdaptedWeights:
    """Keeps the original weights of those layers of a model that have had an adapter.

    Made after the parameters got their final storage.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._own: dict[str, tuple[AdaptedWeight, Tensor]] = {}
        self._changed: set[str] = set()
        """Layers that differ from their original weights now."""

    def expected(self, spec: AdapterSpec) -> AdapterTensors:
        """The tensors of an adapter of that kind; the layers that it changes are kept from now on.

        Raises:
            ModelUnreadable: the model lacks layers that the adapter names.
        """
        expected = AdapterTensors.of_model(self._model, spec, str(self._model.dtype).removeprefix("torch."))
        for layer in expected.layers.values():
            if layer.name not in self._own:
                own = layer.weight.detach()
                self._own[layer.name] = layer, own if untie(self._model, layer) else own.clone()
        return expected

    @torch.no_grad()
    def load(self, tensors: WeightTensors, expected: AdapterTensors | None) -> None:
        """Merge the adapter of checked ``tensors`` into the original model; None: there is no adapter."""
        layers = {} if expected is None else expected.layers
        for name in self._changed - {layer.name for layer in layers.values()}:
            layer, own = self._own[name]
            layer.weight.copy_(own)
        self._changed = {layer.name for layer in layers.values()}
        for place, layer in layers.items():
            weight = layer.weight
            a, b = (as_tensor(tensors[key], weight.dtype).to(weight.device) for key in tensor_names(place))
            assert expected is not None
            layer.adapted(self._own[layer.name][1], a, b, expected.spec.scale, out=weight)

    @property
    def are_adapted(self) -> bool:
        """Whether an adapter is merged into the model now."""
        return bool(self._changed)

    def forget(self) -> None:
        """Take the model's present weights for the original ones."""
        self._own, self._changed = {}, set()


class SleepingWeights:
    """Frees the memory of a model's parameters until ``restore``. ``keep``: hold a copy on the host."""

    def __init__(self, model: torch.nn.Module, *, keep: bool) -> None:
        self._held: list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]] = []
        storages = {s.data_ptr(): s for s in (p.data.untyped_storage() for p in model.parameters())}
        for storage in storages.values():
            self._held.append((storage, storage.nbytes(), storage.cpu() if keep else None))
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate the memory again; without ``keep`` its contents are undefined until the next load."""
        for storage, nbytes, copy in self._held:
            storage.resize_(nbytes)
            if copy is not None:
                storage.copy_(copy)
