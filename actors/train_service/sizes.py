"""Estimates the bytes of trained state of a model from its files, without loading it.

The state is the weights in the model's dtype, a float32 master copy if that is another dtype, Adam's two moments, and
each replica's gradients. With an adapter only the adapter's count: a frozen or a reference model is no trained state.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, Final

from actors.models.adapter import AdapterSpec
from actors.trainer.setup import resolve_replicas
from configs.adapter_schema import ALL_LINEAR
from configs.model_files import HEAD, names_experts

_HEADER_LENGTH_BYTES: Final = 8
_HEADER_MAX_BYTES: Final = 100_000_000
"""Limit of safetensors itself."""
_FLOAT32_BYTES: Final = 4
_MOMENT_BYTES: Final = {"adamw8bit": 2 * (1 + _FLOAT32_BYTES / 256)}
"""Bytes of both moments of a trained number, by the optimizer; of others two of float32, which they do not exceed."""


def parameters_of(model_path: Path, adapter: AdapterSpec | None = None) -> int:
    """Number of parameters in a model's safetensors files, or at most in an adapter of it; 0 if unreadable."""
    try:
        shapes = [shape for path in sorted(model_path.glob("*.safetensors")) for shape in _shapes(path)]
        if adapter is None:
            return sum(math.prod(shape) for _, shape in shapes)
        adapted = [shape for name, shape in shapes if _may_be_adapted(name, shape, adapter)]
        return sum(adapter.rank * math.prod(shape[:-2]) * sum(shape[-2:]) for shape in adapted)
    except (OSError, ValueError, KeyError, TypeError):
        return 0  # loading the model will say what is wrong with it


def state_bytes(
    model_path: Path, *, dtype: str, replicas: int, adapter: AdapterSpec | None = None, optimizer: str = ""
) -> int:
    """Bytes of the state of a job that trains the model of ``model_path``, or an ``adapter`` of it; 0 if its files do
    not tell. ``optimizer``: as ``trainer.optimizer``.
    """
    weight = _FLOAT32_BYTES if dtype == "float32" else 2
    low = 0 if dtype == "float32" else weight
    each = weight + (0 if dtype == "float32" else _FLOAT32_BYTES)
    each += _MOMENT_BYTES.get(optimizer, 2 * _FLOAT32_BYTES)
    return math.ceil(parameters_of(model_path, adapter) * (each + replicas * (_FLOAT32_BYTES + low)))


def state_dtype(backend: str, dtype: str) -> str:
    """The dtype of a job's trained weights; ranks keep their rows in float32 alone, whatever ``model.dtype`` is."""
    return "float32" if backend == "fsdp" else dtype


def replicas_of(model_path: Path, *, backend: str, device: str, threads: int) -> int:
    """Number of gradient replicas of such a backend. ``threads``: 0 is one for each core."""
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
    """Whether the layer may get an adapter. Embeddings count too, since files do not tell them from linear layers, and
    an output embedding may be tied to the input's.

    Experts have other names in files, one matrix for each or one tensor for all: with any of them, all count.
    """
    if ".experts." in name or len(shape) == 3:
        return len(shape) > 1 and any(map(names_experts, adapter.targets))
    layer, targets = name.removesuffix(".weight"), adapter.targets
    is_embedding = not any(part.isdecimal() for part in layer.split("."))
    is_named = layer.endswith(targets) or (is_embedding and HEAD in targets)
    return len(shape) == 2 and (not targets or ALL_LINEAR in targets or is_named)


def _shapes(path: Path) -> list[tuple[str, list[int]]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
        if not 0 < length <= _HEADER_MAX_BYTES:
            raise ValueError(f"{path} is no safetensors file")
        header: dict[str, Any] = json.loads(file.read(length))
    return [(name, entry["shape"]) for name, entry in header.items() if name != "__metadata__"]
