"""What a torch backend's state is made of, when it changes, and how it is moved out and in.

    trained    weights (flat, the model's dtype) · master (float32, if another) · counts · exp_avg.i · exp_avg_sq.i
    sums       sums.i, a block a replica, nothing after a step

A critic's blocks are the same once more, each name behind ``critic.``; what has no critic has none of them.

Moments are blocks once they are there. ``counts`` is float64: steps of the backend, then Adam's of each group, the
policy's before a critic's. What a failed backward pass has left in low precision is no state: it is forgotten.

On a CPU bytes are copied and hashed chunk by chunk on all cores. On CUDA they go to and from pinned memory on a stream
of their own, and are hashed as they arrive, or before they leave.

All but ``parts`` and the sizes is called on the backend's thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from actors.trainer.backends.torch.adam import MOMENTS, Adam
from actors.trainer.backends.torch.device_copies import DeviceCopies
from actors.trainer.backends.torch.flat import FlatParameters, bytes_of
from actors.trainer.errors import ParkedStateDamaged
from actors.trainer.parking import SUMS, TRAINED, StatePart, StoredPart, place_blocks
from actors.weights.memory import copy_and_hash

_COUNTS = "counts"


class Bundle:
    """Knows the tensors of one backend's state. ``changed`` is told of everything that changes them.

    ``models``: each by what the names of its blocks begin with; the first is the policy.
    """

    def __init__(self, models: Mapping[str, tuple[FlatParameters, Adam]]) -> None:
        self._models = models
        self._adams = [adam for _, adam in models.values()]
        self._versions = {TRAINED: 1, SUMS: 1}
        self._sums_are_zero = True
        self._has_moments = [adam.has_moments for adam in self._adams]
        device = models[""][0].flat.device
        self._copies = DeviceCopies(device) if device.type == "cuda" else None
        self.released = False

    @property
    def keeps_addresses(self) -> bool:
        return all(flat.memory.keeps_addresses for flat, _ in self._models.values())

    # ------------------------------------------------------------ what there is

    def changed(self, part: str, *, sums_are_zero: bool = False) -> None:
        """``part`` is about to change, or has changed."""
        self._versions[part] += 1
        if part == SUMS:
            self._sums_are_zero = sums_are_zero
        else:
            self._has_moments = [adam.has_moments for adam in self._adams]

    def fingerprint(self) -> str:
        return "\n".join(
            f"{name or 'torch'}\n{flat.fingerprint()}\n{len(flat.sums)} replicas"
            for name, (flat, _) in self._models.items()
        )

    def parts(self) -> tuple[StatePart, ...]:
        """Counted from sizes alone, so that it may be asked for from any thread."""
        lengths, sums = list[tuple[str, int]](), list[tuple[str, int]]()
        for (name, (flat, adam)), has_moments in zip(self._models.items(), self._has_moments, strict=True):
            numbers = flat.master.numel()
            lengths.append((f"{name}weights", flat.total_bytes))
            if flat.master is not flat.flat:
                lengths.append((f"{name}master", 4 * numbers))
            if not name:
                lengths.append((_COUNTS, 8 * self._counted))
            if has_moments:
                sizes = list(enumerate(adam.sizes))
                lengths += [(f"{name}{moment}.{index}", 4 * size) for moment in MOMENTS for index, size in sizes]
            if not self._sums_are_zero:
                sums += [(f"{name}sums.{index}", 4 * numbers) for index in range(len(flat.sums))]
        return (
            StatePart(name=TRAINED, version=self._versions[TRAINED], blocks=place_blocks(lengths)),
            StatePart(name=SUMS, version=self._versions[SUMS], blocks=place_blocks(sums)),
        )

    def resident_bytes(self) -> int:
        taken = (sum(map(flat.memory.taken_bytes, _sizes(flat, adam))) for flat, adam in self._models.values())
        return sum(taken) + 8 * self._counted

    def released_bytes(self) -> int:
        left = (flat.memory.released_bytes(_sizes(flat, adam)) for flat, adam in self._models.values())
        return sum(left) + 8 * self._counted

    @property
    def _counted(self) -> int:
        """Numbers in ``counts``."""
        return 1 + sum(adam.groups for adam in self._adams)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors by the names of their blocks; ``low.i``, which is no block, is released with them."""
        return {
            name + inner: tensor
            for name, (flat, adam) in self._models.items()
            for inner, tensor in _tensors(flat, adam).items()
        }

    def counts(self) -> list[float]:
        """Adam's step counts, one a group."""
        return [count for adam in self._adams for count in adam.counts()]

    def _release(self) -> None:
        for flat, adam in self._models.values():
            flat.memory.release(_tensors(flat, adam).values())

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
        """The backend's step count, from the stored state.

        Raises:
            ParkedStateDamaged: it does not fit its hashes; what there was is released.
        """
        blocks = {block.name for block in stored[TRAINED].blocks}
        for name, (_, adam) in self._models.items():
            if f"{name}exp_avg.0" in blocks:
                adam.states()  # made here if this is another life's state
        tensors = self.tensors()
        counts = torch.zeros(self._counted, dtype=torch.float64)
        self._sums_are_zero = self._sums_are_zero and SUMS not in stored
        try:
            if self.released:
                for flat, adam in self._models.values():
                    flat.memory.back(_tensors(flat, adam).values())
            for part in stored.values():
                self._take(part, {**tensors, _COUNTS: counts})
        except BaseException:  # not enough memory, too
            self.released = True
            self._release()
            raise
        self._zero(tensors, [block.name for part in stored.values() for block in part.blocks])
        at = 1
        for adam in self._adams:
            if adam.has_moments:
                adam.set_counts(counts[at : at + adam.groups].tolist())
            at += adam.groups
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
        """What was not stored is zeros. On a CPU it is already, unless it was something else when it was released."""
        for name, tensor in tensors.items():
            if name not in restored and (self._copies is not None or not self._sums_are_zero or "exp" in name):
                tensor.zero_()

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()


def _sizes(flat: FlatParameters, adam: Adam) -> Iterator[int]:
    """Bytes of each tensor of one model, those of moments from the start on."""
    numbers = flat.master.numel()
    yield flat.total_bytes
    if flat.master is not flat.flat:
        yield 4 * numbers
    yield from (4 * size for _ in MOMENTS for size in adam.sizes)
    for sums in flat.sums:
        yield 4 * numbers
        if sums.low is not sums.total:
            yield flat.total_bytes


def _tensors(flat: FlatParameters, adam: Adam) -> dict[str, Tensor]:
    """The tensors of one model."""
    tensors = {"weights": flat.flat}
    if flat.master is not flat.flat:
        tensors["master"] = flat.master
    if adam.has_moments:
        for index, state in enumerate(adam.states()):
            tensors |= {f"{moment}.{index}": state[moment] for moment in MOMENTS}
    for index, sums in enumerate(flat.sums):
        tensors[f"sums.{index}"] = sums.total
        if sums.low is not sums.total:
            tensors[f"low.{index}"] = sums.low
    return tensors
