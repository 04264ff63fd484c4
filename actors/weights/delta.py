"""A chunk encoded as its difference from the same chunk of another version, without loss.

    new, old ─▶ which words differ ─▶ gaps between them │ new XOR old of each ─▶ byte planes ─▶ zstd ─▶ delta
    delta, old ─▶ a copy of old, those words XORed back

After a step of reinforcement learning about one bfloat16 weight in a hundred has another value: the update of the
others is lost in rounding. So a delta is mostly the gaps, a byte each, and one or two bits for each change. If too much
has changed there is no delta, and the chunk is sent as it is.

No delta is trusted: one that does not fit raises MalformedDelta, and the result of one that does is checked against
the hash in the version's manifest like any other chunk.

    delta = width u8 │ words changed u32 │ zstd( gap planes 0…3 │ xor planes 0…width-1 )
"""

from __future__ import annotations

import struct
import threading
from typing import Any, Final

import numpy as np
import zstandard

from actors.weights.errors import MalformedDelta
from actors.weights.memory import copy

Buffer = memoryview | bytes | bytearray | np.ndarray[Any, Any]

_HEAD: Final = struct.Struct("<BI")
_GAP_BYTES: Final = 4
_WIDTHS: Final = (1, 2, 4, 8)
_CHANGED_MAX: Final = 0.25
"""Share of changed words above which a delta is not worth its time."""
_BLOCK_BYTES: Final = 8
_LEVEL: Final = 1
_local = threading.local()


def word_bytes(itemsizes: set[int], *sizes: int) -> int:
    """Bytes of the words to compare: those of an element, if all are equal and all ``sizes`` are multiples; else 1."""
    width = itemsizes.pop() if len(itemsizes) == 1 else 1
    return width if width in _WIDTHS and not any(size % width for size in sizes) else 1


def encode_delta(new: Buffer, old: Buffer, width: int) -> bytes | None:
    """The delta of ``new`` from ``old`` (same length, a multiple of ``width``); None if it is not much shorter."""
    size = _view(new).nbytes
    found = _differences(new, old, width, changed_max=int(_CHANGED_MAX * (size // width)))
    if found is None:
        return None
    changed, differences = found
    gaps = np.diff(changed, prepend=-1).astype("<u4") - np.uint32(1)
    planes = np.concatenate([_planes(gaps), _planes(differences)])
    delta = _HEAD.pack(width, len(changed)) + _compressor().compress(planes.tobytes())
    return delta if len(delta) < size // 2 else None


def _differences(
    new: Buffer, old: Buffer, width: int, *, changed_max: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
    """Which words differ, in order, and new XOR old of each; None if more than ``changed_max`` do.

    Eight bytes are compared at a time: most hold no changed word, and only the others are searched for words.
    """
    wide = _BLOCK_BYTES if _view(new).nbytes % _BLOCK_BYTES == 0 else width
    fresh, former = _words(new, wide), _words(old, wide)
    blocks = np.flatnonzero(fresh != former)
    if len(blocks) > changed_max:
        return None
    words = (fresh.take(blocks) ^ former.take(blocks)).view(f"<u{width}")
    differing = np.flatnonzero(words != 0)
    if len(differing) > changed_max:
        return None
    shift = (wide // width).bit_length() - 1  # from blocks to words; division would take longer than all the rest
    changed = (blocks.take(differing >> shift) << shift) + (differing & (1 << shift) - 1)
    return changed, words.take(differing)


def apply_delta(delta: Buffer, old: Buffer, place: memoryview) -> None:
    """Write to ``place`` what ``delta`` makes of ``old``.

    Raises:
        MalformedDelta: it is no delta, or none for this length. ``place`` may have been written to.
    """
    if isinstance(delta, np.ndarray) and delta.ndim != 1:
        raise MalformedDelta(f"a delta of shape {delta.shape} is no row of bytes")
    data, former = _view(delta), _view(old)
    size = former.nbytes
    if len(data) < _HEAD.size or len(place) != size:
        raise MalformedDelta(f"a delta of {len(data)} bytes for {len(place)}, of a chunk of {size}")
    width, count = _HEAD.unpack_from(data)
    if width not in _WIDTHS or size % width or count > size // width:
        raise MalformedDelta(f"a delta of {count} words of {width} bytes, for a chunk of {size}")
    planes = _decompressed(data[_HEAD.size :], count * (_GAP_BYTES + width))
    gaps = _joined(planes[: count * _GAP_BYTES], "<u4", _GAP_BYTES)
    changed = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if count and changed[-1] >= size // width:
        raise MalformedDelta(f"a delta changes word {changed[-1]} of {size // width}")
    copy(former, place)
    _words(place, width)[changed] ^= _joined(planes[count * _GAP_BYTES :], f"<u{width}", width)


def _view(data: Buffer) -> memoryview:
    return (data.data if isinstance(data, np.ndarray) else memoryview(data)).cast("B")


def _words(data: Buffer, width: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, dtype=f"<u{width}")


def _planes(words: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """All first bytes, then all second bytes, …: similar ones come together, which compresses well."""
    return words.view(np.uint8).reshape(-1, words.itemsize).T.reshape(-1)


def _joined(planes: np.ndarray[Any, Any], dtype: str, width: int) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(planes.reshape(width, -1).T).reshape(-1).view(dtype)


def _compressor() -> zstandard.ZstdCompressor:
    """This thread's compressor, since threads cannot share one."""
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False)
    return _local.compressor


def _decompressed(data: memoryview, want: int) -> np.ndarray[Any, Any]:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    try:
        if zstandard.frame_content_size(data) != want:
            raise MalformedDelta(f"a delta's planes are not {want} bytes")
        planes = _local.decompressor.decompress(data, max_output_size=want)
    except zstandard.ZstdError as error:
        raise MalformedDelta(f"a delta could not be read: {error}") from error
    if len(planes) != want:
        raise MalformedDelta(f"a delta's planes are {len(planes)} bytes, not {want}")
    return np.frombuffer(planes, np.uint8)
