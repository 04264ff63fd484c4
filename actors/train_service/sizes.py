"""Bytes of trained state that a model will have, told from its files: nothing is loaded.

State is the weights in the model's dtype, a float32 master if that is another one, Adam's two moments, and the gradient
sums of each replica. With an adapter it is the adapter's alone: the frozen model is none, as a reference model is none.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, Final

from actors.host.adapter import AdapterSpec
from actors.trainer.setup import resolve_replicas

_HEADER_LENGTH_BYTES: Final = 8
_HEADER_MAX_BYTES: Final = 100_000_000
"""As safetensors itself has it."""
_FLOAT32_BYTES: Final = 4
_MOMENTS: Final = 2


def parameters_of(model_path: Path, adapter: AdapterSpec | None = None) -> int:
    """Number of parameters in the safetensors files of a model's directory, or at most of an adapter of that model; 0
    where there are none, or none to read.
    """
    try:
        shapes = [shape for path in sorted(model_path.glob("*.safetensors")) for shape in _shapes(path)]
        if adapter is None:
            return sum(math.prod(shape) for _, shape in shapes)
        return sum(adapter.rank * sum(shape) for name, shape in shapes if _may_be_adapted(name, shape, adapter))
    except (OSError, ValueError, KeyError, TypeError):
        return 0  # whoever loads the model will say what is wrong with it


def state_bytes(model_path: Path, *, dtype: str, replicas: int, adapter: AdapterSpec | None = None) -> int:
    """Bytes of the state of a job that trains the model of ``model_path``, or an ``adapter`` of it; 0 if its files do
    not tell.
    """
    weight = _FLOAT32_BYTES if dtype == "float32" else 2
    low = 0 if dtype == "float32" else weight
    each = weight + (0 if dtype == "float32" else _FLOAT32_BYTES) + _MOMENTS * _FLOAT32_BYTES
    return parameters_of(model_path, adapter) * (each + replicas * (_FLOAT32_BYTES + low))


def replicas_of(model_path: Path, *, backend: str, device: str, threads: int) -> int:
    """Replicas of the gradients that a backend of that kind has. ``threads``: 0 is a thread a core."""
    if (backend, device) != ("torch", "cpu"):
        return 1
    return resolve_replicas(threads or len(os.sched_getaffinity(0)), model_path)


def in_words(count: int) -> str:
    """Bytes as people read them."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _may_be_adapted(name: str, shape: list[int], adapter: AdapterSpec) -> bool:
    """Files do not tell a linear layer from an embedding, so this is too much rather than too little."""
    layer = name.removesuffix(".weight")
    return len(shape) == 2 and (not adapter.targets or layer.endswith(adapter.targets))


def _shapes(path: Path) -> list[tuple[str, list[int]]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
        if not 0 < length <= _HEADER_MAX_BYTES:
            raise ValueError(f"{path} is no safetensors file")
        header: dict[str, Any] = json.loads(file.read(length))
    return [(name, entry["shape"]) for name, entry in header.items() if name != "__metadata__"]
