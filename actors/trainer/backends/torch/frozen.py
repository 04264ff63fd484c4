"""Frozen reference models, shared read-only by the bundles of one process that began from the same model.

Nothing writes them and no gradient reaches them, so several jobs of a training service need one copy. It is freed with
the last bundle that uses it, and is no bundle's state: parking does not move it.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from actors.trainer.backend import BackendSpec, MicroBatch
from actors.trainer.backends.torch.causal_lm import ResponseLogits, load_model
from actors.trainer.backends.torch.replicas import scored


class _Key(NamedTuple):
    """Identifies a reference: two with the same key are the same model."""

    path: Path
    dtype: str
    device: str
    attention: str


class FrozenReference:
    """Scores with a model that does not change; calls may come from several threads, and wait for each other."""

    def __init__(self, spec: BackendSpec) -> None:
        self._lock = threading.Lock()
        plain = replace(spec, router_replay=False, load_balancing=False, recompute="none")  # no gradient, no routes
        self._logits = ResponseLogits(load_model(spec.model_path, plain).requires_grad_(False), spec.device)

    def score(self, batch: MicroBatch, temperature: float) -> np.ndarray:
        with self._lock:
            return scored(self._logits, batch, temperature)


_SHARED: Final[weakref.WeakValueDictionary[_Key, FrozenReference]] = weakref.WeakValueDictionary()
_LOADING: Final = threading.Lock()
"""Lock that makes bundles that start together load one after the other, so that the second finds the first's model."""


def frozen_reference(spec: BackendSpec) -> FrozenReference:
    """The reference of ``spec``, shared with other parkable bundles of this process that have the same one."""
    if not spec.parkable:
        return FrozenReference(spec)
    key = _Key(spec.model_path.resolve(), spec.dtype, spec.device, spec.attention)
    with _LOADING:
        reference = _SHARED.get(key)
        if reference is None:
            reference = _SHARED[key] = FrozenReference(spec)
        return reference
