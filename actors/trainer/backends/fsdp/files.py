"""The leader's own work with files: it makes room, describes their content, and gives them their final names."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any, Final

import torch

from actors.protocol.weights import TensorEntry
from actors.trainer.backends.fsdp import parts
from actors.trainer.backends.fsdp.core import FsdpCore
from actors.trainer.backends.fsdp.orders import Restore
from actors.trainer.backends.torch.exported_files import as_it_was, copy_tokenizer
from actors.trainer.backends.torch.torch_backend import (
    CRITIC_FILE,
    STATE_FILE,
    TENSOR_FILE,
    TorchBackend,
    check_critic,
)
from actors.trainer.backends.torch.trained_adapter import check_described
from actors.trainer.errors import CheckpointCorrupt
from actors.weights.manifest import hash_chunks
from actors.weights.memory import SegmentWriter

KIND: Final = "fsdp"


def finish_segment(
    memory: mmap.mmap, path: Path, chunk_bytes: int, tensors: tuple[TensorEntry, ...], writer: SegmentWriter
) -> tuple[bytes, ...]:
    """Give the segment in ``memory``, written by all ranks, its name ``path``; returns the hashes of its chunks."""
    end = 0
    for entry in tensors:  # memory that was used before may hold anything between tensors
        memory[end : entry.offset_bytes] = bytes(entry.offset_bytes - end)
        end = entry.offset_bytes + entry.length_bytes
    memory[end:] = bytes(len(memory) - end)
    with memoryview(memory) as data:
        hashes = hash_chunks(data, chunk_bytes)
    writer.finish(path)
    return hashes


def empty_file(path: Path, size: int) -> Path:
    """A file of ``size`` bytes for the ranks to write into."""
    with path.open("wb") as file:
        file.truncate(size)
    return path


def clear(directory: Path) -> None:
    """Make the directory of a checkpoint, without shards that another number of ranks may have left there."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in directory.rglob("shard-*.safetensors"):
        file.unlink()


def write_state(directory: Path, core: FsdpCore) -> None:
    """Write ``backend.json``, which describes what the ranks have written."""
    state = {"format": 1, "kind": KIND, "steps": core.steps, "optimizer_steps": core.policy.steps}
    state |= {"ranks": core.world.size, "replicas": core.world.replicas}
    if core.critic is not None:
        state |= {"critic_steps": core.critic.steps}
    if core.adapter is not None:
        state |= core.adapter.described()
    (directory / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n")


def read_state(directory: Path, core: FsdpCore) -> Restore:
    """The order by which the ranks load the checkpoint in ``directory``.

    Raises:
        CheckpointCorrupt: its state file cannot be read, or is of another kind of backend or another adapter.
    """
    try:
        state = json.loads((directory / STATE_FILE).read_text())
        kind, steps = str(state["kind"]), int(state["steps"])
        check_described(state, core.adapter, directory)
        check_critic(directory, trained=core.critic is not None)
        if kind == TorchBackend.kind:
            critic_steps = 0 if core.critic is None else parts.flat_steps(directory / CRITIC_FILE)
            return Restore(str(directory), kind, steps, parts.flat_steps(directory / TENSOR_FILE), critic_steps)
        if kind == KIND:
            critic_steps = 0 if core.critic is None else int(state.get("critic_steps", 0))
            return Restore(str(directory), kind, steps, int(state["optimizer_steps"]), critic_steps)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointCorrupt(f"{directory / STATE_FILE}: {error}; resume from another checkpoint") from error
    raise CheckpointCorrupt(
        f"{directory}: holds the state of trainer.backend {kind!r}, and fsdp reads that of fsdp and torch; resume with "
        "the job as it was, or begin a new run"
    )


def export(core: FsdpCore, rows: Path, directory: Path, model_path: Path) -> None:
    """Write the weights, which the ranks have written to the file ``rows``, as a directory of Hugging Face or PEFT."""
    data = torch.from_file(str(rows), shared=False, size=core.policy.rows.total_bytes, dtype=torch.uint8)
    weights = {
        entry.name: data[entry.offset_bytes : entry.offset_bytes + entry.length_bytes]
        .view(getattr(torch, entry.dtype))
        .view(entry.shape)
        for entry in core.policy.rows.entries
    }
    if core.adapter is not None:
        core.adapter.export(directory, core.policy.model, weights)
        return
    model: Any = core.policy.model
    with as_it_was(model):
        model.save_pretrained(directory, state_dict=weights, safe_serialization=True)
    model.config.dtype = getattr(torch, core.dtype)  # until now that of the master weights
    model.config.save_pretrained(directory)
    copy_tokenizer(model_path, directory)
