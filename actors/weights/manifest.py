"""How a version lies in its segment, and how it is checked.

Invariants
- Tensors start at multiples of ``ALIGNMENT_BYTES``, in the order of their names as given, and never overlap.
- Chunk i covers bytes [i * chunk_bytes, min((i + 1) * chunk_bytes, total_bytes)); its hash is xxh3-128.
- ``check_manifest`` accepts nothing that would make a view leave the segment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from actors.protocol.weights import Chunk, Manifest, TensorEntry
from actors.weights.errors import MalformedManifest

ALIGNMENT_BYTES: Final = 64

NUMPY_DTYPES: Final[Mapping[str, str]] = {
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",  # numpy has no bfloat16: the raw 16 bits travel, the name says what they are
    "float64": "<f8",
    "int64": "<i8",
    "int32": "<i4",
    "uint8": "|u1",
    "bool": "|b1",
}


def layout(shapes: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[tuple[TensorEntry, ...], int]:
    """Place tensors ``(name, dtype, shape)`` one after another; returns the entries and the segment's size in bytes."""
    entries: list[TensorEntry] = []
    offset = 0
    for name, dtype, shape in shapes:
        length = math.prod(shape) * np.dtype(NUMPY_DTYPES[dtype]).itemsize
        entries.append(TensorEntry(name, dtype, tuple(shape), offset, length))
        offset += -(-length // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(entries), offset


def chunk_bounds(manifest: Manifest, index: int) -> tuple[int, int]:
    """First and last-plus-one byte of a chunk."""
    start = index * manifest.chunk_bytes
    return start, min(start + manifest.chunk_bytes, manifest.total_bytes)


def whole_chunk(manifest: Manifest, view: memoryview, index: int) -> Chunk:
    """A chunk of the version in ``view``, as it lies there, not copied."""
    start, end = chunk_bounds(manifest, index)
    return Chunk(policy_version=manifest.policy_version, index=index, data=np.frombuffer(view[start:end], np.uint8))


def wrong_chunks(manifest: Manifest, chunks: np.ndarray) -> str:
    """Why ``chunks``, as they came from whoever asks for them, cannot be chunks of the version; empty if they can."""
    count = len(manifest.chunk_hashes)
    if chunks.ndim != 1 or chunks.dtype != np.int32 or len(chunks) > count:
        asked = f"{chunks.dtype}{list(chunks.shape)}"
        return f"chunks are asked for as int32[n], of version {manifest.policy_version} at most {count}: not {asked}"
    wrong = chunks[(chunks < 0) | (chunks >= count)]
    return f"chunk {wrong[0]} does not exist: version {manifest.policy_version} has {count}" if len(wrong) else ""


def hash_chunks(data: memoryview | bytes | bytearray, chunk_bytes: int) -> tuple[bytes, ...]:
    """xxh3-128 digests of every chunk of ``data``."""
    view = memoryview(data)
    return tuple(xxhash.xxh3_128_digest(view[i : i + chunk_bytes]) for i in range(0, len(view), chunk_bytes))


def chunk_is_intact(manifest: Manifest, index: int, data: memoryview | bytes) -> bool:
    start, end = chunk_bounds(manifest, index)
    return len(data) == end - start and xxhash.xxh3_128_digest(data) == manifest.chunk_hashes[index]


def same_layout(one: Manifest, other: Manifest) -> bool:
    """Whether every byte of both versions stands for the same element, in the same chunk."""
    return (one.tensors, one.total_bytes, one.chunk_bytes) == (other.tensors, other.total_bytes, other.chunk_bytes)


def check_manifest(manifest: Manifest) -> None:
    """Refuse a manifest whose tensors or chunks do not fit its size.

    Raises:
        MalformedManifest: names the tensor or the count that is off.
    """
    chunks = -(-manifest.total_bytes // manifest.chunk_bytes) if manifest.chunk_bytes > 0 else -1
    if chunks != len(manifest.chunk_hashes):
        raise MalformedManifest(
            f"version {manifest.policy_version}: {manifest.total_bytes} bytes in chunks of {manifest.chunk_bytes} need "
            f"{chunks} hashes, the manifest has {len(manifest.chunk_hashes)}"
        )
    end = 0
    for entry in manifest.tensors:
        if entry.dtype not in NUMPY_DTYPES:
            raise MalformedManifest(f"{entry.name}: dtype {entry.dtype!r} is none of {sorted(NUMPY_DTYPES)}")
        want = math.prod(entry.shape) * np.dtype(NUMPY_DTYPES[entry.dtype]).itemsize
        if entry.length_bytes != want or any(n < 0 for n in entry.shape):
            raise MalformedManifest(
                f"{entry.name}: {entry.shape} of {entry.dtype} needs {want} bytes, not {entry.length_bytes}"
            )
        if entry.offset_bytes < end or entry.offset_bytes + want > manifest.total_bytes:
            raise MalformedManifest(f"{entry.name}: bytes {entry.offset_bytes}+{want} overlap or leave the segment")
        end = entry.offset_bytes + want


class SegmentViews(dict[str, np.ndarray]):
    """Holds views of a version by parameter name, and says which file they are views of, for others to map it too."""

    def __init__(self, manifest: Manifest, data: memoryview, path: Path) -> None:
        super().__init__(tensor_views(manifest, data))
        self.entries = manifest.tensors
        self.path = path


def tensor_views(manifest: Manifest, data: memoryview | bytes | bytearray) -> dict[str, np.ndarray]:
    """Read-only arrays over ``data`` by parameter name; nothing is copied."""
    return entry_views(manifest.tensors, data)


def entry_views(entries: Sequence[TensorEntry], data: memoryview | bytes | bytearray) -> dict[str, np.ndarray]:
    """``tensor_views`` of tensors that lie in ``data`` as ``entries`` say."""
    views: dict[str, np.ndarray] = {}
    for entry in entries:
        raw = memoryview(data)[entry.offset_bytes : entry.offset_bytes + entry.length_bytes]
        array = np.frombuffer(raw, dtype=NUMPY_DTYPES[entry.dtype]).reshape(entry.shape)
        array.flags.writeable = False
        views[entry.name] = array
    return views
