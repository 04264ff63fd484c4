"""The state of a sharded backend on disk: torch's distributed checkpoint (DCP), a safetensors file for each rank.

    trainer/backend.json                     kind, steps, number of ranks
    trainer/shard-00001-model-…safetensors   rank 0's rows of ``master.NAME``, ``exp_avg.NAME``, ``exp_avg_sq.NAME``
    trainer/shard-00002-model-…safetensors   …
    trainer/critic/shard-…                   the same of a critic

Any number of ranks reads what any number has written: each reads the rows that it holds. A checkpoint of the torch
backend is read as well: its one file is flat, so rows are a part of it.

DCP's usual plans and its ``.metadata`` are pickles. So each rank plans for itself, and the files say what is in them.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from actors.trainer.backends.fsdp.sharded_model import Rows, first_row, local
from actors.trainer.backends.torch.adam import MOMENTS
from actors.trainer.errors import CheckpointCorrupt

warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
"""DCP says so whenever a rank plans for itself."""


class _OwnPlan(DefaultSavePlanner):
    """Plans for one rank, whose rows are not all there are."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.global_plan, self.metadata = all_plans, Metadata({})
        return self.global_plan, self.metadata


class _OwnFile(HuggingFaceStorageWriter):
    """Writes the file of one rank."""

    def __init__(self, directory: Path, rank: int) -> None:
        super().__init__(str(directory), save_distributed=True)
        self._rank = rank

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [dataclasses.replace(plan, storage_data={"shard_index": self._rank + 1}) for plan in plans]


def save(directory: Path, state: dict[str, Tensor], rank: int) -> None:
    """Write this rank's rows."""
    state_dict_saver.save(state, storage_writer=_OwnFile(directory, rank), planner=_OwnPlan(), no_dist=True)


def load(directory: Path, state: dict[str, Tensor], model_path: Path) -> None:
    """Read this rank's rows into ``state``.

    Raises:
        CheckpointCorrupt: a file is missing or cannot be read, or they are of another model than ``model_path``.
    """
    try:
        found = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
        _check(directory, found, state, model_path)
        state_dict_loader.load(state, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)
    except (OSError, ValueError, LookupError, SafetensorError, CheckpointException) as error:
        raise CheckpointCorrupt(f"{directory}: {error}; resume from another checkpoint") from error


def _check(directory: Path, found: Mapping[str, Any], state: Mapping[str, Tensor], model_path: Path) -> None:
    if more := sorted(set(found) - set(state)):
        raise CheckpointCorrupt(f"{directory}: holds {more[0]}, so it is of another model than {model_path}")
    for name, own in state.items():
        there = found.get(name)
        if not isinstance(there, TensorStorageMetadata):
            raise CheckpointCorrupt(f"{directory}: holds no {name}, so it is of another model than {model_path}")
        rows = sum(math.prod(chunk.sizes) for chunk in there.chunks)
        if rows < math.prod(there.size) or (there.size != own.shape and there.size[1:] == own.shape[1:]):
            raise CheckpointCorrupt(
                f"{directory}: {name} has {rows} of {own.numel()} numbers: a rank's file is missing, or it is of "
                f"another model than {model_path}; resume from another checkpoint"
            )
        if there.size != own.shape or there.properties.dtype != own.dtype:
            raise CheckpointCorrupt(
                f"{directory}: {name} is {there.properties.dtype} {list(there.size)}, and that of {model_path} is "
                f"{own.dtype} {list(own.shape)}: another model"
            )


def load_flat(path: Path, state: dict[str, Tensor], rows: Rows, model_path: Path) -> None:
    """Read this rank's rows from the file of a torch backend.

    Raises:
        CheckpointCorrupt: it cannot be read, or is of another model than ``model_path``.
    """
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("layout") != rows.fingerprint():
                raise CheckpointCorrupt(f"{path}: holds another model or dtype than {model_path}, or an adapter")
            first_vector = next((e.offset_bytes for e in rows.entries if len(e.shape) < 2), None)
            for entry in rows.entries:
                is_vector = first_vector is not None and len(entry.shape) < 2 and first_vector > 0
                before = first_vector if is_vector else 0
                for kind in ("master", *MOMENTS):
                    own = state[f"{kind}.{entry.name}"]
                    group, less = (f"{kind}.{int(is_vector)}", before or 0) if kind != "master" else (kind, 0)
                    mine = local(own)
                    itemsize = entry.length_bytes // max(1, math.prod(entry.shape))
                    start = (entry.offset_bytes - less) // itemsize + first_row(own) * math.prod(entry.shape[1:])
                    mine.copy_(file.get_slice(group)[start : start + mine.numel()].view(mine.shape))
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointCorrupt(f"{path}: {error}; resume from another checkpoint") from error


def flat_steps(path: Path) -> int:
    """Steps of the optimizer in the file of a torch backend.

    Raises:
        CheckpointCorrupt: it cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return int(file.get_tensor("step.0"))
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointCorrupt(f"{path}: {error}; resume from another checkpoint") from error
