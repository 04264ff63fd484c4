"""Packs sequences of different lengths into padded batches, for both decoders of the torch engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

LOOKS_FOR_A_TOKEN: Final = 8
"""Number of known tokens that count as one computed token: attention only reads them."""


def prefill_chunks(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group sequences by length into padded batches of at most ``max_tokens`` (a longer one goes alone); by index."""
    return behind_chunks(lengths, lengths, max_tokens)


def behind_chunks(
    computed: Sequence[int], lengths: Sequence[int], max_tokens: int, *, spread: float = math.inf
) -> list[list[int]]:
    """As ``prefill_chunks`` for sequences of ``lengths``, of which only the last ``computed`` tokens are computed.

    ``spread``: the difference that ``computed`` may have within a batch.
    """
    chunks: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(computed)), key=lambda i: (computed[i], lengths[i])):
        longest = max(longest, lengths[index])
        size = max(computed[index], -(-longest // LOOKS_FOR_A_TOKEN))
        fits = chunks and size * (len(chunks[-1]) + 1) <= max_tokens
        if fits and computed[index] <= computed[chunks[-1][0]] + spread:
            chunks[-1].append(index)
        else:
            chunks.append([index])
            longest = lengths[index]
    return chunks
