"""State that a backend hands over and takes back when a training service parks its bundle.

    StatePart   trained   weights, master, Adam's moments, step counts   changes with ``step`` and ``load``
                sums      gradient sums, a block for each replica        changes with ``accumulate``, empty after a step
    Block                 one tensor's bytes at an offset of its part

    resident ── copy_out ─▶ resident, stored ── release ─▶ released ── restore ─▶ resident

Invariants (asserted for every kind of backend by ``tests/contracts/test_parkable_contract.py``)
- ``restore`` brings back, bit for bit, what ``copy_out`` stored: weights, master, moments, step counts, gradient sums.
- Equal versions of a part mean equal bytes. Scoring, exporting, saving and parking change no version, restoring does.
- A part without blocks holds nothing but zeros: it is not stored, and ``restore`` of nothing gives zeros.
- After ``release`` a backend refuses every call with ``StateParked`` but ``restore``, ``stored_bytes``, ``parts`` and
  ``close``, and holds no more than ``released_bytes`` of what it held.
- Tensors keep their identity, and their addresses wherever ``keeps_addresses`` says so.
- ``restore`` checks every byte that it reads; where one does not fit its hash it raises ``ParkedStateDamaged``, and the
  backend stays released.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol, runtime_checkable

from actors.trainer.backend import TrainBackend
from actors.weights.manifest import ALIGNMENT_BYTES

TRAINED: Final = "trained"
SUMS: Final = "sums"


class Block(NamedTuple):
    """Places one tensor's bytes in its part."""

    name: str
    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePart:
    """Describes a part of the state: blocks that change together."""

    name: str
    version: int
    """Number that changes whenever the bytes may have changed."""
    blocks: tuple[Block, ...] = ()
    """Blocks in order; none if the part is all zeros or does not exist yet."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the part's stored copy."""
        return size_bytes(self.blocks)


class Place(NamedTuple):
    """Room for a part's copy: a file, mapped into memory here. Ranks of a backend open it by its path."""

    memory: memoryview
    path: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPart:
    """Holds a part's stored copy, a file that is mapped into memory here."""

    blocks: tuple[Block, ...]
    memory: memoryview
    hashes: tuple[bytes, ...]
    """Digests (xxh3-128) of each block's chunks of ``chunk_bytes``, one block after the other."""
    chunk_bytes: int
    path: Path
    """The file, for processes that open it themselves."""

    def block(self, name: str) -> memoryview:
        (found,) = (block for block in self.blocks if block.name == name)
        return self.memory[found.offset_bytes :][: found.length_bytes]


def place_blocks(lengths: Sequence[tuple[str, int]]) -> tuple[Block, ...]:
    """Lay blocks ``(name, length in bytes)`` out one after another, aligned as tensors of a segment are."""
    blocks: list[Block] = []
    offset = 0
    for name, length in lengths:
        blocks.append(Block(name, offset, length))
        offset += -(-length // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(blocks)


def size_bytes(blocks: Sequence[Block]) -> int:
    """Bytes from the start of the first block to the end of the last."""
    return blocks[-1].offset_bytes + blocks[-1].length_bytes if blocks else 0


@runtime_checkable
class Parkable(TrainBackend, Protocol):
    """A backend that can hand its state over; calls come one at a time, as those of ``TrainBackend`` do."""

    @property
    def steps(self) -> int:
        """Optimizer steps in the state."""
        ...

    @property
    def keeps_addresses(self) -> bool:
        """Whether tensors have the same addresses after ``release`` and ``restore``."""
        ...

    def fingerprint(self) -> str:
        """A text that says which tensors of which kind lie where; state may be restored only where it is equal."""
        ...

    def parts(self) -> tuple[StatePart, ...]:
        """The parts of the state as it is now; after ``release``, as it was."""
        ...

    def resident_bytes(self) -> int:
        """Bytes of the state while it is resident, moments that the first step will make included.

        Activations, and a frozen reference, are no state: they are not counted.
        """
        ...

    def released_bytes(self) -> int:
        """Bytes that stay after ``release``: less than two pages for each tensor, and small things such as counts."""
        ...

    async def copy_out(self, places: Mapping[str, Place], chunk_bytes: int) -> dict[str, tuple[bytes, ...]]:
        """Copy the parts named in ``places`` there; returns their digests, as in ``StoredPart.hashes``."""
        ...

    async def release(self) -> None:
        """Give the state's memory back. The caller has a stored copy of every part that has blocks."""
        ...

    async def restore(self, stored: Mapping[str, StoredPart]) -> None:
        """Take the state back from its stored copy; parts that are not named are zeros.

        Works also for a backend that has just been started for the same model, without a ``release``.

        Raises:
            ParkedStateDamaged: a byte does not fit its hash; the backend is released.
        """
        ...

    async def forget_place(self, memory: memoryview) -> None:
        """Unpin ``memory``, which was copied to or from and will not be used again."""
        ...
