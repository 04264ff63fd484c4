"""The state of a torch backend: its parts, when they change, and how they are moved out and in.

    trained    weights (flat, the model's dtype) · master (float32, if another) · counts · exp_avg.i, or what else the
               optimizer keeps
    sums       sums.i, a block for each replica, nothing after a step

A critic has the same blocks once more, each name behind ``critic.``, except ``counts``.

The optimizer's tensors are blocks once they exist. ``counts`` is float64: steps of the backend, then those of each
group of an optimizer, the policy's before a critic's. What a failed backward pass has left in low precision is no
state, and is dropped.

On a CPU bytes are copied and hashed chunk by chunk on all cores. On CUDA they go to and from pinned memory on a stream
of their own, and are hashed as they arrive, or before they leave.

All methods but ``parts`` and those of sizes are called on the backend's thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from actors.trainer.backends.torch.flat import FlatParameters, bytes_of
from actors.trainer.backends.torch.optimizers import Optimizer
from actors.trainer.backends.torch.pinned import DeviceCopies
from actors.trainer.errors import ParkedStateDamaged
from actors.trainer.parking import SUMS, TRAINED, StatePart, StoredPart, place_blocks
from actors.weights.memory import copy_and_hash

_COUNTS = "counts"


class ParkableState:
    """Knows the tensors of one backend's state. The backend reports each change of them by ``changed``.

    ``models``: by the prefix of their blocks' names; the first is the policy.
    """

    def __init__(self, models: Mapping[str, tuple[FlatParameters, Optimizer]]) -> None:
        self._models = models
        self._optimizers = [optimizer for _, optimizer in models.values()]
        self._versions = {TRAINED: 1, SUMS: 1}
        self._sums_are_zero = True
        self._has_state = [optimizer.has_state for optimizer in self._optimizers]
        device = models[""][0].flat.device
        self._copies = DeviceCopies(device) if device.type == "cuda" else None
        self.released = False

    @property
    def keeps_addresses(self) -> bool:
        return all(flat.memory.keeps_addresses for flat, _ in self._models.values())

    # ------------------------------------------------------------ parts and sizes

    def changed(self, part: str, *, sums_are_zero: bool = False) -> None:
        """Note that ``part`` is about to change, or has changed."""
        self._versions[part] += 1
        if part == SUMS:
            self._sums_are_zero = sums_are_zero
        else:
            self._has_state = [optimizer.has_state for optimizer in self._optimizers]

    def fingerprint(self) -> str:
        return "\n".join(
            f"{name or 'torch'}\n{flat.fingerprint()}\n{len(flat.sums)} replicas{_named(optimizer)}"
            for name, (flat, optimizer) in self._models.items()
        )

    def parts(self) -> tuple[StatePart, ...]:
        """The parts, computed from sizes alone, so that any thread may ask for them."""
        lengths, sums = list[tuple[str, int]](), list[tuple[str, int]]()
        for (name, (flat, optimizer)), has_state in zip(self._models.items(), self._has_state, strict=True):
            numbers = flat.master.numel()
            lengths.append((f"{name}weights", flat.total_bytes))
            if flat.master is not flat.flat:
                lengths.append((f"{name}master", 4 * numbers))
            if not name:
                lengths.append((_COUNTS, 8 * self._counted))
            if has_state:
                lengths += [(f"{name}{inner}", size) for inner, size in optimizer.sizes]
            if not self._sums_are_zero:
                sums += [(f"{name}sums.{index}", 4 * numbers) for index in range(len(flat.sums))]
        return (
            StatePart(name=TRAINED, version=self._versions[TRAINED], blocks=place_blocks(lengths)),
            StatePart(name=SUMS, version=self._versions[SUMS], blocks=place_blocks(sums)),
        )

    def resident_bytes(self) -> int:
        taken = (
            sum(map(flat.memory.taken_bytes, _sizes(flat, optimizer))) for flat, optimizer in self._models.values()
        )
        return sum(taken) + 8 * self._counted

    def released_bytes(self) -> int:
        left = (flat.memory.released_bytes(_sizes(flat, optimizer)) for flat, optimizer in self._models.values())
        return sum(left) + 8 * self._counted

    @property
    def _counted(self) -> int:
        """Count of numbers in ``counts``."""
        return 1 + sum(optimizer.groups for optimizer in self._optimizers)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors by the names of their blocks, and ``low.i``, which is no block but is released with them."""
        return {
            name + inner: tensor
            for name, (flat, optimizer) in self._models.items()
            for inner, tensor in _tensors(flat, optimizer).items()
        }

    def counts(self) -> list[float]:
        """Step counts of the optimizers' groups."""
        return [count for optimizer in self._optimizers for count in optimizer.counts()]

    def _release(self) -> None:
        for flat, optimizer in self._models.values():
            flat.memory.release(_tensors(flat, optimizer).values())

    # ------------------------------------------------------------ out

    def copy_out(self, places: Mapping[str, memoryview], chunk_bytes: int, steps: int) -> dict[str, tuple[bytes, ...]]:
        counts = np.array([steps, *self.counts()], dtype=np.float64)
        tensors = {**self.tensors(), _COUNTS: torch.from_numpy(counts)}
        digests: dict[str, tuple[bytes, ...]] = {}
        for part in self.parts():
            if part.name not in places:
                continue
            pairs = [
                (tensors[block.name], places[part.name][block.offset_bytes :][: block.length_bytes])
                for block in part.blocks
            ]
            if self._copies is not None:
                digests[part.name] = self._copies.out(places[part.name], pairs, chunk_bytes)
                continue
            found = (copy_and_hash(bytes_of(tensor), place, chunk_bytes) for tensor, place in pairs)
            digests[part.name] = tuple(digest for of_block in found for digest in of_block)
        return digests

    def release(self) -> None:
        if not self.released:
            self.released = True
            self._release()

    def forget_place(self, memory: memoryview) -> None:
        if self._copies is not None:
            self._copies.forget(memory)

    # ------------------------------------------------------------ in

    def restore(self, stored: Mapping[str, StoredPart]) -> int:
        """Load the stored state; returns the backend's step count.

        Raises:
            ParkedStateDamaged: the state does not fit its hashes; all tensors are released then.
        """
        blocks = {block.name for block in stored[TRAINED].blocks}
        for name, (_, optimizer) in self._models.items():
            if any(f"{name}{inner}" in blocks for inner, _ in optimizer.sizes):
                optimizer.state()  # makes the tensors, if this is another life's state
        tensors = self.tensors()
        counts = torch.zeros(self._counted, dtype=torch.float64)
        self._sums_are_zero = self._sums_are_zero and SUMS not in stored
        try:
            if self.released:
                for flat, optimizer in self._models.values():
                    flat.memory.back(_tensors(flat, optimizer).values())
            for part in stored.values():
                self._take(part, {**tensors, _COUNTS: counts})
        except BaseException:  # also when memory is short
            self.released = True
            self._release()
            raise
        self._zero(tensors, [block.name for part in stored.values() for block in part.blocks])
        at = 1
        for optimizer in self._optimizers:
            if optimizer.has_state:
                optimizer.set_counts(counts[at : at + optimizer.groups].tolist())
            at += optimizer.groups
        self.released = False
        self.changed(TRAINED)
        self.changed(SUMS, sums_are_zero=SUMS not in stored)
        return int(counts[0])

    def _take(self, part: StoredPart, tensors: Mapping[str, Tensor]) -> None:
        pairs = [
            (part.memory[block.offset_bytes :][: block.length_bytes], tensors[block.name]) for block in part.blocks
        ]
        if self._copies is not None:
            found = self._copies.back(part.memory, pairs, part.chunk_bytes)
        else:
            copied = (copy_and_hash(place, bytes_of(tensor), part.chunk_bytes) for place, tensor in pairs)
            found = tuple(digest for of_block in copied for digest in of_block)
        if found != part.hashes:
            raise ParkedStateDamaged(
                "parked state does not fit its hashes: it was altered, and is not used; resume from a checkpoint"
            )

    def _zero(self, tensors: Mapping[str, Tensor], restored: list[str]) -> None:
        """Zero the tensors that were not stored. On a CPU, sums that were zeros before the release are so already."""
        states = {f"{name}{inner}" for name, (_, own) in self._models.items() for inner, _ in own.sizes}
        for name, tensor in tensors.items():
            if name not in restored and (self._copies is not None or not self._sums_are_zero or name in states):
                tensor.zero_()

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()


def _named(optimizer: Optimizer) -> str:
    """The optimizer's name where it is not AdamW, which states of before it had a name have."""
    return "" if optimizer.name == "adamw" else f"\n{optimizer.name}"


def _sizes(flat: FlatParameters, optimizer: Optimizer) -> Iterator[int]:
    """Bytes of each tensor of one model, with the optimizer's even before they exist."""
    numbers = flat.master.numel()
    yield flat.total_bytes
    if flat.master is not flat.flat:
        yield 4 * numbers
    yield from (size for _, size in optimizer.sizes)
    for sums in flat.sums:
        yield 4 * numbers
        if sums.low is not sums.total:
            yield flat.total_bytes


def _tensors(flat: FlatParameters, optimizer: Optimizer) -> dict[str, Tensor]:
    """The tensors of one model, by name."""
    tensors = {"weights": flat.flat}
    if flat.master is not flat.flat:
        tensors["master"] = flat.master
    if optimizer.has_state:
        tensors |= optimizer.state()
    for index, sums in enumerate(flat.sums):
        tensors[f"sums.{index}"] = sums.total
        if sums.low is not sums.total:
            tensors[f"low.{index}"] = sums.low
    return tensors
