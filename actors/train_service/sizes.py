"""Bytes of trained state that a model will have, told from its files: nothing is loaded.

State is the weights in the model's dtype, a float32 master if that is another one, Adam's two moments, and the gradient
sums of each replica.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, Final

from actors.trainer.setup import resolve_replicas

_HEADER_LENGTH_BYTES: Final = 8
_HEADER_MAX_BYTES: Final = 100_000_000
"""As safetensors itself has it."""
_FLOAT32_BYTES: Final = 4
_MOMENTS: Final = 2


def parameters_of(model_path: Path) -> int:
    """Number of parameters in the safetensors files of a model's directory; 0 where there are none, or none to read."""
    try:
        return sum(_elements(path) for path in sorted(model_path.glob("*.safetensors")))
    except (OSError, ValueError, KeyError, TypeError):
        return 0  # whoever loads the model will say what is wrong with it


def state_bytes(model_path: Path, *, dtype: str, replicas: int) -> int:
    """Bytes of the state of a job that trains the model of ``model_path``; 0 if its files do not tell."""
    weight = _FLOAT32_BYTES if dtype == "float32" else 2
    low = 0 if dtype == "float32" else weight
    each = weight + (0 if dtype == "float32" else _FLOAT32_BYTES) + _MOMENTS * _FLOAT32_BYTES
    return parameters_of(model_path) * (each + replicas * (_FLOAT32_BYTES + low))


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


def _elements(path: Path) -> int:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
        if not 0 < length <= _HEADER_MAX_BYTES:
            raise ValueError(f"{path} is no safetensors file")
        header: dict[str, Any] = json.loads(file.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
