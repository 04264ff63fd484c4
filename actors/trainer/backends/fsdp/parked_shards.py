"""The state of ranks as it is parked: one file a part, in which each rank's rows lie one after another.

    trained   counts · 0.master.<name> · 0.exp_avg.<name> · 0.exp_avg_sq.<name> … 1.master.<name> …
    sums      0.sums.<name> … 1.sums.<name> …, nothing after a step

A critic has the same blocks once more, with ``critic.`` before each tensor's name. ``counts`` is float64: steps of the
backend, of the policy's optimizer, and of a critic's. Rows are float32, whatever dtype they are gathered in.

Invariants
- Each rank copies its own rows, and checks the hashes of those alone; rank 0 writes ``counts``, which all read.
- Nothing here is an exchange between ranks: one that fails leaves them in agreement on what comes next.
- What a rank has written counts once the leader has the hashes of all: only then is there a manifest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from actors.trainer.backends.fsdp.core import FsdpCore
from actors.trainer.backends.fsdp.orders import StoredFile
from actors.trainer.backends.fsdp.sharded_model import local, place_of
from actors.trainer.backends.fsdp.trained_shard import TrainedShard
from actors.trainer.backends.torch.flat import bytes_of
from actors.trainer.backends.torch.flat_memory import PlainMemory
from actors.trainer.backends.torch.optimizers import MOMENTS
from actors.trainer.errors import ParkedStateDamaged
from actors.trainer.parking import SUMS, TRAINED, Block
from actors.weights.memory import copy_and_hash

_COUNTS: Final = "counts"
_FLOAT32_BYTES: Final = 4
_KEPT: Final = ("master", *MOMENTS)


class ParkedShards:
    """Knows one rank's tensors by the names of their blocks, and the lengths of those of all ranks."""

    def __init__(self, core: FsdpCore) -> None:
        self._core = core
        self._rank = core.world.rank
        self._memory = PlainMemory(core.world.device)
        self._released: list[Tensor] = []
        """The memory that was given back, as uint8 over each whole storage: rows may have padding behind them."""

    @property
    def _models(self) -> dict[str, TrainedShard]:
        """Trained models, by the prefix of their blocks' names."""
        return {"": self._core.policy} | ({} if self._core.critic is None else {"critic.": self._core.critic})

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for prefix, model in self._models.items():
            yield from ((prefix + name, own) for name, own in model.rows.parameters)

    # ------------------------------------------------------------ sizes

    def lengths(self, part: str) -> list[tuple[str, int]]:
        """Name and length in bytes of each block of ``part``, the first rank's first; none is empty."""
        kinds = _KEPT if part == TRAINED else (SUMS,)
        found = [(_COUNTS, 8 * (1 + len(self._models)))] if part == TRAINED else []
        for rank in range(self._core.world.shards):
            for name, own in self._parameters():
                size = _FLOAT32_BYTES * _numbers_of(own, rank)
                found += [(f"{rank}.{kind}.{name}", size) for kind in kinds if size]
        return found

    @property
    def keeps_addresses(self) -> bool:
        return self._memory.keeps_addresses

    def released_bytes(self) -> int:
        """Bytes that all ranks keep after ``release``, at most."""
        return self._memory.released_bytes(size for _, size in self.lengths(TRAINED))

    def fingerprint(self) -> str:
        models = (f"{prefix or 'fsdp'}\n{model.rows.fingerprint()}" for prefix, model in self._models.items())
        return "\n".join([*models, f"{self._core.world.shards} ranks"])

    # ------------------------------------------------------------ this rank's tensors

    def _tensors(self, part: str) -> dict[str, Tensor]:
        """This rank's rows, by the names of their blocks; sums that do not exist yet are made, as zeros."""
        found: dict[str, Tensor] = {}
        for prefix, model in self._models.items():
            if part == TRAINED:
                for name, tensor in model.state().items():
                    kind, _, rest = name.partition(".")
                    found[f"{self._rank}.{kind}.{prefix}{rest}"] = local(tensor)
                continue
            for name, own in model.rows.parameters:
                if own.grad is None:
                    own.grad = torch.zeros_like(own)
                found[f"{self._rank}.{part}.{prefix}{name}"] = local(own.grad)
        return {name: tensor for name, tensor in found.items() if tensor.numel()}

    def copy_out(self, files: Mapping[str, StoredFile]) -> dict[str, tuple[bytes, ...]]:
        """Copy this rank's blocks of each part into its file; returns their digests, block after block."""
        digests: dict[str, tuple[bytes, ...]] = {}
        for part, file in files.items():
            tensors, memory = self._tensors(part), file.memory
            if self._rank == 0 and part == TRAINED:
                tensors[_COUNTS] = torch.from_numpy(self._counts())
            copied = (
                copy_and_hash(bytes_of(_flat(tensors[block.name]).cpu()), _place(memory, block), file.chunk_bytes)
                for block in file.blocks
                if block.name in tensors
            )
            digests[part] = tuple(chain.from_iterable(copied))
        return digests

    def _counts(self) -> np.ndarray:
        return np.array([self._core.steps, *(model.steps for model in self._models.values())], dtype=np.float64)

    def release(self) -> None:
        """Give the memory of this rank's state back. Idempotent."""
        if not self._released:
            storages = (tensor.untyped_storage() for tensor in self._tensors(TRAINED).values())
            self._released = [torch.empty(0, dtype=torch.uint8, device=own.device).set_(own) for own in storages]
            self._memory.release(self._released)
        self._drop_sums()

    def _drop_sums(self) -> None:
        """Let the gradient sums go, and nothing else: statistics stay where they are until the step."""
        for _, own in self._parameters():
            own.grad = None

    def restore(self, files: Mapping[str, StoredFile]) -> None:
        """Take this rank's rows back; those of parts that are not named become zeros.

        Raises:
            ParkedStateDamaged: a byte does not fit its hash, or a file is gone; what was restored so far is void.
        """
        self._drop_sums()
        self._memory.back(self._released)
        self._released = []
        for part, file in files.items():
            self._take(file, self._tensors(part))

    def _take(self, file: StoredFile, tensors: dict[str, Tensor]) -> None:
        counts = np.zeros(1 + len(self._models))
        tensors = {**tensors, _COUNTS: torch.from_numpy(counts)}
        try:
            memory = file.memory
        except (OSError, ValueError) as error:
            raise ParkedStateDamaged(f"parked state is gone: {error}; resume from a checkpoint") from error
        for block, hashes in file.hashes_by_block():
            if block.name not in tensors:
                continue  # another rank's
            tensor = tensors[block.name]
            rows = torch.empty(tensor.numel(), dtype=tensor.dtype)
            if copy_and_hash(_place(memory, block), bytes_of(rows), file.chunk_bytes) != hashes:
                raise ParkedStateDamaged(
                    "parked state does not fit its hashes: it was altered, and is not used; resume from a checkpoint"
                )
            tensor.copy_(rows.view(tensor.shape))
            if block.name == _COUNTS:
                self._core.steps = int(counts[0])
                for model, count in zip(self._models.values(), counts[1:], strict=True):
                    model.set_steps(int(count))


def _numbers_of(own: Tensor, rank: int) -> int:
    return math.prod(place_of(own, rank)[0]) if isinstance(own, DTensor) else own.numel()


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)


def _place(memory: memoryview, block: Block) -> memoryview:
    return memory[block.offset_bytes :][: block.length_bytes]
