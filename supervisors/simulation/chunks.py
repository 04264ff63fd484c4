"""Wrong bits in weights: in the segment that a machine holds in memory, or in a chunk on its way."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from actors.protocol.weights import Chunk
from configs.fault_plan import ChunkTarget
from transport.codec import decode_body, encode_body
from transport.envelope import decode_envelope
from transport.transport import Frame

_TAG = b"weights.chunk"


def flip_segment(segment: Path, index: int | None, rng: random.Random) -> Callable[[], None]:
    """Replace ``segment`` by a copy with one bit wrong; returns how to mend it, unless it has been removed meanwhile.

    Who has mapped and verified it keeps the right bytes.
    """
    right = segment.read_bytes()
    place = rng.randrange(len(right))
    wrong = bytearray(right)
    wrong[place] ^= 1 << rng.randrange(8)
    _replace(segment, bytes(wrong))

    def mend() -> None:
        if segment.exists():
            _replace(segment, right)

    return mend


def _replace(segment: Path, data: bytes) -> None:
    copy = segment.with_name(segment.name + ".copy")
    copy.write_bytes(data)
    copy.rename(segment)


class Tampering:
    """Flips a bit of each chunk of ``job`` that passes and is meant."""

    def __init__(self, job: str, target: ChunkTarget, rng: random.Random) -> None:
        self._job = job
        self._target = target
        self._rng = rng

    def __call__(self, source: str, frames: list[Frame]) -> list[Frame]:
        """The frames, with a bit wrong if they are a chunk of these weights."""
        if _TAG not in bytes(frames[0]) or f".{self._job}." not in source:
            return frames
        if decode_envelope(frames[0]).tag != _TAG.decode():
            return frames
        chunk = decode_body(Chunk, frames[1:])
        target = self._target
        if target.version not in (None, chunk.policy_version) or target.index not in (None, chunk.index):
            return frames
        data = chunk.data.copy()
        data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        return [frames[0], *encode_body(Chunk(policy_version=chunk.policy_version, index=chunk.index, data=data))]
