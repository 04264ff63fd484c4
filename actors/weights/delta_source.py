"""Deltas of one version against another, made when the first puller asks, on all cores, and kept for the next ones.

If a version turns out to have changed too much (float32, a high learning rate), no more deltas of it are tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from actors.protocol.weights import Manifest
from actors.weights.delta import encode_delta, word_bytes
from actors.weights.manifest import NUMPY_DTYPES, chunk_bounds
from actors.weights.memory import on_all_cores, warm

_TRIES: Final = 4
"""Chunks in a row without a delta after which no more are tried."""


class DeltaSource:
    """Makes deltas of the version at ``new`` against ``old``, of the same layout. Only one thread calls ``make``."""

    def __init__(self, manifest: Manifest, new: memoryview, old: memoryview) -> None:
        self._manifest = manifest
        self._new, self._old = new, old
        itemsizes = {np.dtype(NUMPY_DTYPES[entry.dtype]).itemsize for entry in manifest.tensors}
        self._width = word_bytes(itemsizes, manifest.chunk_bytes, manifest.total_bytes)
        self._made: dict[int, bytes | None] = {}
        self._in_vain = 0

    def make(self, chunks: Sequence[int]) -> dict[int, bytes]:
        """Deltas of ``chunks``, where they are much shorter than the chunk. Blocks."""
        lacking = [index for index in chunks if index not in self._made]
        on_all_cores(self._encode, lacking, len(lacking) * self._manifest.chunk_bytes)
        return {index: delta for index in chunks if (delta := self._made[index]) is not None}

    def _encode(self, index: int) -> None:
        self._made[index] = None
        if self._in_vain >= _TRIES:
            return
        start, end = chunk_bounds(self._manifest, index)
        warm(self._new, start, end)
        warm(self._old, start, end)
        delta = encode_delta(self._new[start:end], self._old[start:end], self._width)
        self._in_vain = self._in_vain + 1 if delta is None else 0
        self._made[index] = delta
