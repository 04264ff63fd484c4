"""The layout of a version in its segment, and checks of both.

Invariants
- Tensors start at multiples of ``ALIGNMENT_BYTES``, in the order given, and never overlap.
- Chunk i covers bytes [i * chunk_bytes, min((i + 1) * chunk_bytes, total_bytes)); its hash is xxh3-128. If there are
  several sources, chunks also end where the source changes, so that each chunk has one (``cut_for_sources``).
- ``check_manifest`` accepts nothing that would make a view leave the segment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
    if manifest.chunk_ends:
        return manifest.chunk_ends[index - 1] if index else 0, manifest.chunk_ends[index]
    start = index * manifest.chunk_bytes
    return start, min(start + manifest.chunk_bytes, manifest.total_bytes)


def cut_for_sources(ranges: Iterable[tuple[int, int]], chunk_bytes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ends and sources of the chunks of ``ranges``, each (end in bytes, number of its source), in order from byte 0."""
    joined: list[tuple[int, int]] = []
    for end, source in ranges:
        if joined and joined[-1][1] == source:
            joined.pop()
        joined.append((end, source))
    cuts: list[tuple[int, int]] = []
    start = 0
    for end, source in joined:
        cuts += [(min(at + chunk_bytes, end), source) for at in range(start, end, chunk_bytes)]
        start = end
    return tuple(end for end, _ in cuts), tuple(source for _, source in cuts)


def chunks_of(manifest: Manifest, source: str) -> list[int]:
    """Numbers of the chunks that ``source`` has: all of them where there is one source."""
    if not manifest.sources:
        return list(range(len(manifest.chunk_hashes)))
    number = manifest.sources.index(source) if source in manifest.sources else -1
    return [index for index, one in enumerate(manifest.chunk_sources) if one == number]


def whole_chunk(manifest: Manifest, view: memoryview, index: int) -> Chunk:
    """A chunk of the version in ``view``, whole and not copied."""
    start, end = chunk_bounds(manifest, index)
    return Chunk(policy_version=manifest.policy_version, index=index, data=np.frombuffer(view[start:end], np.uint8))


def wrong_chunks(manifest: Manifest, chunks: np.ndarray) -> str:
    """Why ``chunks``, as a puller sent them, cannot be numbers of the version's chunks; empty if they can."""
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
    """Whether each byte belongs to the same element, in the same chunk of the same source, in both versions."""
    return _layout_of(one) == _layout_of(other)


def _layout_of(manifest: Manifest) -> tuple[object, ...]:
    cut = manifest.sources, manifest.chunk_ends, manifest.chunk_sources
    return manifest.tensors, manifest.total_bytes, manifest.chunk_bytes, *cut


def check_manifest(manifest: Manifest) -> None:
    """Refuse a manifest whose tensors or chunks do not fit its size.

    Raises:
        MalformedManifest: names the tensor or the count that is off.
    """
    chunks = -(-manifest.total_bytes // manifest.chunk_bytes) if manifest.chunk_bytes > 0 else -1
    if manifest.sources or manifest.chunk_ends:
        chunks = _chunks_of_sources(manifest)
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


def _chunks_of_sources(manifest: Manifest) -> int:
    """The number of chunks of a version that lies on several machines.

    Raises:
        MalformedManifest: its chunks do not cover the version one after another, or one has no source.
    """
    ends, sources = manifest.chunk_ends, manifest.chunk_sources
    rising = all(0 < end - start <= manifest.chunk_bytes for start, end in zip((0, *ends), ends, strict=False))
    named = all(0 <= source < len(manifest.sources) for source in sources) and manifest.sources[:1] == ("",)
    if not rising or ends[-1:] != (manifest.total_bytes,) or len(sources) != len(ends) or not named:
        raise MalformedManifest(
            f"version {manifest.policy_version}: {len(ends)} chunks of {len(manifest.sources)} sources do not cover "
            f"its {manifest.total_bytes} bytes one after another in pieces of at most {manifest.chunk_bytes}"
        )
    return len(ends)


class SegmentViews(dict[str, np.ndarray]):
    """Holds views of a version by parameter name, and the path of the file they view, for others to map."""

    def __init__(self, manifest: Manifest, data: memoryview, path: Path) -> None:
        super().__init__(tensor_views(manifest, data))
        self.entries = manifest.tensors
        self.path = path


def tensor_views(manifest: Manifest, data: memoryview | bytes | bytearray) -> dict[str, np.ndarray]:
    """Read-only arrays over ``data`` by parameter name; nothing is copied."""
    return entry_views(manifest.tensors, data)


def entry_views(entries: Sequence[TensorEntry], data: memoryview | bytes | bytearray) -> dict[str, np.ndarray]:
    """Read-only arrays over ``data`` of the tensors in ``entries``, by name; nothing is copied."""
    views: dict[str, np.ndarray] = {}
    for entry in entries:
        raw = memoryview(data)[entry.offset_bytes : entry.offset_bytes + entry.length_bytes]
        array = np.frombuffer(raw, dtype=NUMPY_DTYPES[entry.dtype]).reshape(entry.shape)
        array.flags.writeable = False
        views[entry.name] = array
    return views
