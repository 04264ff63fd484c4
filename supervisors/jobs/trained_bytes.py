"""How many bytes the trained state of a job takes in a training service, from the headers of its model's weight files.

    a parameter     weights 4 (bfloat16: 2, and a float32 master of 4) · Adam's moments 8
                    gradient sums of each replica 4 (bfloat16: 6)

Activations, and the frozen reference of a KL term, are no state: ``ServiceConfig.memory_bytes`` does not count them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

from actors.trainer.setup import resolve_replicas, resolve_threads, weights_bytes
from configs.schema import JobConfig
from configs.services import ServiceConfig

_HEADER_BYTES_MAX: Final = 100_000_000
"""A safetensors file with a longer header is refused by safetensors itself."""


def trained_bytes(job: JobConfig, model_path: Path, service: ServiceConfig | None = None) -> int:
    """Bytes of the trained state on ``service``, which says how many threads there are; 0: there are no weights yet."""
    count = parameters(model_path)
    if service is not None and service.threads:
        job = job.model_copy(update={"trainer": job.trainer.model_copy(update={"threads": service.threads})})
    replicas = resolve_replicas(resolve_threads(job, model_path), model_path)
    narrow = job.model.dtype == "bfloat16"
    return count * ((14 if narrow else 12) + (6 if narrow else 4) * replicas)


def parameters(model_path: Path) -> int:
    """Numbers in the model's weight files; of files that do not say, as many as fit into them in their dtype."""
    files = sorted(model_path.glob("*.safetensors"))
    if files:
        return sum(_numbers_in(file) for file in files)
    return weights_bytes(model_path) // 4


def _numbers_in(file: Path) -> int:
    """The header is JSON: each tensor's shape, behind eight bytes with the header's length."""
    try:
        with file.open("rb") as source:
            length = int.from_bytes(source.read(8), "little")
            header: dict[str, Any] = json.loads(source.read(min(length, _HEADER_BYTES_MAX)))
        return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError):
        return file.stat().st_size // 4 if file.exists() else 0  # whoever loads it says what is wrong
