"""What a torch backend's state is made of, when it changes, and how it is moved out and in.

    trained    weights (flat, the model's dtype) · master (float32, if another) · counts · exp_avg.i · exp_avg_sq.i
    sums       sums.i, a block a replica, nothing after a step

Moments are blocks once they are there. ``counts`` is float64: steps of the backend, then Adam's of each group. What a
failed backward pass has left in low precision is no state: it is forgotten.

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
    """Knows the tensors of one backend's state. ``changed`` is told of everything that changes them."""

    def __init__(self, flat: FlatParameters, adam: Adam) -> None:
        self.flat, self._adam = flat, adam
        self._versions = {TRAINED: 1, SUMS: 1}
        self._sums_are_zero = True
        self._has_moments = adam.has_moments
        self._copies = DeviceCopies(flat.flat.device) if flat.flat.device.type == "cuda" else None
        self.released = False

    # ------------------------------------------------------------ what there is

    def changed(self, part: str, *, sums_are_zero: bool = False) -> None:
        """``part`` is about to change, or has changed."""
        self._versions[part] += 1
        if part == SUMS:
            self._sums_are_zero = sums_are_zero
        else:
            self._has_moments = self._adam.has_moments

    def fingerprint(self) -> str:
        return f"torch\n{self.flat.fingerprint()}\n{len(self.flat.sums)} replicas"

    def parts(self) -> tuple[StatePart, ...]:
        """Counted from sizes alone, so that it may be asked for from any thread."""
        numbers = self.flat.master.numel()
        lengths = [("weights", self.flat.total_bytes)]
        if self.flat.master is not self.flat.flat:
            lengths.append(("master", 4 * numbers))
        lengths.append((_COUNTS, 8 * (1 + self._adam.groups)))
        if self._has_moments:
            lengths += [
                (f"{moment}.{index}", 4 * size) for moment in MOMENTS for index, size in enumerate(self._adam.sizes)
            ]
        sums = [] if self._sums_are_zero else [(f"sums.{index}", 4 * numbers) for index in range(len(self.flat.sums))]
        return (
            StatePart(name=TRAINED, version=self._versions[TRAINED], blocks=place_blocks(lengths)),
            StatePart(name=SUMS, version=self._versions[SUMS], blocks=place_blocks(sums)),
        )

    def resident_bytes(self) -> int:
        return sum(map(self.flat.memory.taken_bytes, self._sizes())) + 8 * (1 + self._adam.groups)

    def released_bytes(self) -> int:
        return self.flat.memory.released_bytes(self._sizes()) + 8 * (1 + self._adam.groups)

    def _sizes(self) -> Iterator[int]:
        """Bytes of each tensor, those of moments from the start on."""
        numbers = self.flat.master.numel()
        yield self.flat.total_bytes
        if self.flat.master is not self.flat.flat:
            yield 4 * numbers
        yield from (4 * size for _ in MOMENTS for size in self._adam.sizes)
        for sums in self.flat.sums:
            yield 4 * numbers
            if sums.low is not sums.total:
                yield self.flat.total_bytes

    def tensors(self) -> dict[str, Tensor]:
        """Tensors by the names of their blocks; ``low.i``, which is no block, is released with them."""
        tensors = {"weights": self.flat.flat}
        if self.flat.master is not self.flat.flat:
            tensors["master"] = self.flat.master
        if self._adam.has_moments:
            for index, state in enumerate(self._adam.states()):
                tensors |= {f"{moment}.{index}": state[moment] for moment in MOMENTS}
        for index, sums in enumerate(self.flat.sums):
            tensors[f"sums.{index}"] = sums.total
            if sums.low is not sums.total:
                tensors[f"low.{index}"] = sums.low
        return tensors

    def counts(self) -> list[float]:
        """Adam's step counts, one a group."""
        return self._adam.counts()

    # ------------------------------------------------------------ out

    def copy_out(self, places: Mapping[str, memoryview], chunk_bytes: int, steps: int) -> dict[str, tuple[bytes, ...]]:
        counts = np.array([steps, *self._adam.counts()], dtype=np.float64)
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
            self.flat.memory.release(self.tensors().values())

    def forget_place(self, memory: memoryview) -> None:
        if self._copies is not None:
            self._copies.forget(memory)

    # ------------------------------------------------------------ in

    def restore(self, stored: Mapping[str, StoredPart]) -> int:
        """The backend's step count, from the stored state.

        Raises:
            ParkedStateDamaged: it does not fit its hashes; what there was is released.
        """
        if "exp_avg.0" in {block.name for block in stored[TRAINED].blocks}:
            self._adam.states()  # made here if this is another life's state
        tensors = self.tensors()
        counts = torch.zeros(1 + self._adam.groups, dtype=torch.float64)
        self._sums_are_zero = self._sums_are_zero and SUMS not in stored
        try:
            if self.released:
                self.flat.memory.back(tensors.values())
            for part in stored.values():
                self._take(part, {**tensors, _COUNTS: counts})
        except BaseException:  # not enough memory, too
            self.released = True
            self.flat.memory.release(tensors.values())
            raise
        self._zero(tensors, [block.name for part in stored.values() for block in part.blocks])
        if self._adam.has_moments:
            self._adam.set_counts(counts[1:].tolist())
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
