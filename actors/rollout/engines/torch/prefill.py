"""Sequences of many lengths become padded batches, for both decoders of the torch engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

LOOKS_FOR_A_TOKEN: Final = 8
"""Known tokens that count as one that is computed: they are only looked at."""


def prefill_chunks(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut sequences into padded batches of at most ``max_tokens`` (a longer one goes alone), by length."""
    return behind_chunks(lengths, lengths, max_tokens)


def behind_chunks(
    computed: Sequence[int], lengths: Sequence[int], max_tokens: int, *, spread: float = math.inf
) -> list[list[int]]:
    """The same of sequences of which so many tokens are to be computed, the last ones of ``lengths``.

    ``spread``: tokens by which what is computed of a batch's sequences may differ.
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
