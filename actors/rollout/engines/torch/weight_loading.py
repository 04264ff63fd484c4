"""Putting a new policy version into a live torch module, all or nothing, and giving its memory back in sleep.

Invariants
- Everything that can be wrong is checked before the first byte is written.
- Parameters keep their storage, so views (fused matrices, tied embeddings) see the new values.
- A tied parameter may come under any of its names; each distinct parameter must come at least once.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.rollout.engine import WeightTensors
from actors.rollout.errors import WeightsMismatch

_NUMPY_OF = {"bfloat16": "uint16"}
"""dtypes that numpy lacks, and the words in which they travel."""


def verify_weights(model: torch.nn.Module, tensors: WeightTensors, dtypes: Mapping[str, str]) -> None:
    """Check names, shapes and dtypes against ``model``.

    Raises:
        WeightsMismatch: naming up to three culprits of the first kind found.
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
    """``array`` as torch sees it, not copied, and only to be read; what numpy has no word for comes as ``uint16``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the array may be a read-only map of shared memory; it is only read
        tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.view(dtype) if tensor.dtype != dtype else tensor


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


class SleepingWeights:
    """Puts the memory of a model's parameters aside. ``keep``: hold a copy on the host."""

    def __init__(self, model: torch.nn.Module, *, keep: bool) -> None:
        self._held: list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]] = []
        storages = {s.data_ptr(): s for s in (p.data.untyped_storage() for p in model.parameters())}
        for storage in storages.values():
            self._held.append((storage, storage.nbytes(), storage.cpu() if keep else None))
            storage.resize_(0)

    def restore(self) -> None:
        """Take the memory back; without ``keep`` its contents are undefined until the next load."""
        for storage, nbytes, copy in self._held:
            storage.resize_(nbytes)
            if copy is not None:
                storage.copy_(copy)
