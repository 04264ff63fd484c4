"""Frozen reference models, shared read-only by the bundles of one process that began from the same model.

Nobody writes them and no gradient reaches them, so several jobs of a training service need one copy. It goes with the
last bundle that holds it, and is no bundle's state: parking moves it nowhere.
"""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from actors.trainer.backend import BackendSpec, MicroBatch
from actors.trainer.backends.torch.causal_lm import ResponseLogits, load_model
from actors.trainer.backends.torch.replicas import scored


class _Key(NamedTuple):
    """Says what makes two references the same one."""

    path: Path
    dtype: str
    device: str
    gradient_checkpointing: bool


class FrozenReference:
    """Scores with a model that does not change; calls may come from several threads, and take turns."""

    def __init__(self, spec: BackendSpec) -> None:
        self._turn = threading.Lock()
        self._logits = ResponseLogits(load_model(spec.model_path, spec).requires_grad_(False), spec.device)

    def score(self, batch: MicroBatch, temperature: float) -> np.ndarray:
        with self._turn:
            return scored(self._logits, batch, temperature)


_SHARED: Final[weakref.WeakValueDictionary[_Key, FrozenReference]] = weakref.WeakValueDictionary()
_LOADING: Final = threading.Lock()
"""Bundles that start together load one after the other, the second not at all."""


def frozen_reference(spec: BackendSpec) -> FrozenReference:
    """The reference of ``spec``; where bundles share a process, another one's if it is the same."""
    if not spec.parkable:
        return FrozenReference(spec)
    key = _Key(spec.model_path.resolve(), spec.dtype, spec.device, spec.gradient_checkpointing)
    with _LOADING:
        reference = _SHARED.get(key)
        if reference is None:
            reference = _SHARED[key] = FrozenReference(spec)
        return reference
