"""The state of a sharded backend on disk: torch's distributed checkpoint (DCP), a safetensors file for each rank.

    trainer/backend.json                     kind, steps, number of ranks
    trainer/shard-00001-model-…safetensors   rank 0's rows of ``master.NAME``, ``exp_avg.NAME``, ``exp_avg_sq.NAME``
    trainer/shard-00002-model-…safetensors   …
    trainer/critic/shard-…                   the same of a critic

Any number of ranks reads what any number has written: each reads the rows that it holds. A checkpoint of the torch
backend is read as well: its one file is flat, so rows are ranges of it.

DCP's usual plans and its ``.metadata`` are pickles. So each rank plans for itself, and the files say what is in them.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from actors.trainer.backends.fsdp.sharded_model import Piece, Rows
from actors.trainer.backends.torch.optimizers import MOMENTS
from actors.trainer.errors import CheckpointCorrupt

warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
"""DCP warns of this whenever a rank plans for itself."""


Pieces = Mapping[str, Piece]
"""What one rank has of a state: its own, or another's in the leader's memory."""


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    offsets = torch.Size([piece.first, *(0 for _ in piece.whole[1:])][: len(piece.whole)])
    return ChunkStorageMetadata(offsets=offsets, sizes=piece.rows.shape)


class _SavePlan(DefaultSavePlanner):
    """Plans for one rank, whose rows are only a part of the state."""

    def __init__(self, pieces: Pieces) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([self._item(name, piece) for name, piece in self._pieces.items()])
        return self.plan

    @staticmethod
    def _item(name: str, piece: Piece) -> WriteItem:
        chunk, properties = _chunk(piece), TensorProperties.create_from_tensor(piece.rows)
        data = TensorWriteData(chunk=chunk, properties=properties, size=piece.whole)
        return WriteItem(index=MetadataIndex(name, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._pieces[index.fqn].rows

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


class _LoadPlan(DefaultLoadPlanner):
    """Plans for one rank to read its rows from the files of any number of ranks."""

    def __init__(self, pieces: Pieces) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        found = self.metadata.state_dict_metadata
        items = [
            create_read_items_for_chunk_list(name, cast(TensorStorageMetadata, found[name]), [_chunk(piece)])
            for name, piece in self._pieces.items()
        ]
        return LoadPlan([item for of_one in items for item in of_one])

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._pieces[index.fqn].rows


def save(directory: Path, pieces: Pieces, rank: int) -> None:
    """Write the file of ``rank``."""
    state: dict[str, Any] = {name: piece.rows for name, piece in pieces.items()}
    state_dict_saver.save(state, storage_writer=_OwnFile(directory, rank), planner=_SavePlan(pieces), no_dist=True)


def load(directory: Path, pieces: Pieces, model_path: Path) -> None:
    """Read one rank's rows.

    Raises:
        CheckpointCorrupt: a file is missing, cannot be read, or is of another model than ``model_path``.
    """
    try:
        found = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
        _check(directory, found, pieces, model_path)
        state: dict[str, Any] = {name: piece.rows for name, piece in pieces.items()}
        reader = HuggingFaceStorageReader(str(directory))
        state_dict_loader.load(state, storage_reader=reader, planner=_LoadPlan(pieces), no_dist=True)
    except (OSError, ValueError, LookupError, SafetensorError, CheckpointException) as error:
        raise CheckpointCorrupt(f"{directory}: {error}; resume from another checkpoint") from error


def _check(directory: Path, found: Mapping[str, Any], pieces: Pieces, model_path: Path) -> None:
    if more := sorted(set(found) - set(pieces)):
        raise CheckpointCorrupt(f"{directory}: holds {more[0]}, so it is of another model than {model_path}")
    for name, own in pieces.items():
        there = found.get(name)
        if not isinstance(there, TensorStorageMetadata):
            raise CheckpointCorrupt(f"{directory}: holds no {name}, so it is of another model than {model_path}")
        rows = sum(math.prod(chunk.sizes) for chunk in there.chunks)
        if rows < math.prod(there.size) or (there.size != own.whole and there.size[1:] == own.whole[1:]):
            raise CheckpointCorrupt(
                f"{directory}: {name} has {rows} of {math.prod(own.whole)} numbers: a rank's file is missing, or it is "
                f"of another model than {model_path}; resume from another checkpoint"
            )
        if there.size != own.whole or there.properties.dtype != own.rows.dtype:
            raise CheckpointCorrupt(
                f"{directory}: {name} is {there.properties.dtype} {list(there.size)}, and that of {model_path} is "
                f"{own.rows.dtype} {list(own.whole)}: another model"
            )


def load_flat(path: Path, pieces: Pieces, rows: Rows, model_path: Path) -> None:
    """Read one rank's rows from the file of a torch backend.

    Raises:
        CheckpointCorrupt: the file cannot be read, or is of another model than ``model_path``.
    """
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("layout") != rows.fingerprint():
                raise CheckpointCorrupt(
                    f"{path}: holds another model or dtype than {model_path}, an adapter, or the state of another "
                    "trainer.optimizer than adamw"
                )
            first_vector = next((e.offset_bytes for e in rows.entries if len(e.shape) < 2), None)
            for entry in rows.entries:
                is_vector = first_vector is not None and len(entry.shape) < 2 and first_vector > 0
                before = first_vector if is_vector else 0
                for kind in ("master", *MOMENTS):
                    mine, first, _ = pieces[f"{kind}.{entry.name}"]
                    group, less = (f"{kind}.{int(is_vector)}", before or 0) if kind != "master" else (kind, 0)
                    itemsize = entry.length_bytes // max(1, math.prod(entry.shape))
                    start = (entry.offset_bytes - less) // itemsize + first * math.prod(entry.shape[1:])
                    mine.copy_(file.get_slice(group)[start : start + mine.numel()].view(mine.shape))
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointCorrupt(f"{path}: {error}; resume from another checkpoint") from error


def flat_steps(path: Path) -> int:
    """Steps of the optimizer in the file of a torch backend.

    Raises:
        CheckpointCorrupt: the file cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return int(file.get_tensor("step.0"))
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointCorrupt(f"{path}: {error}; resume from another checkpoint") from error
