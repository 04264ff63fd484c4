"""Sequences of many lengths become padded batches, for both decoders of the torch engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

LOOKS_FOR_A_TOKEN: Final = 8
"""Known tokens that count as one that is computed: they are only looked at."""


def prefill_chunks(lengths: Sequence[int], max_tokens: int, *, spread: float = math.inf) -> list[list[int]]:
    """Cut sequences into padded batches of at most ``max_tokens`` (a longer one goes alone), by length.

    ``spread``: tokens by which the longest of a batch may exceed the shortest.
    """
    chunks: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        fits = chunks and lengths[index] * (len(chunks[-1]) + 1) <= max_tokens
        if fits and lengths[index] <= lengths[chunks[-1][0]] + spread:
            chunks[-1].append(index)
        else:
            chunks.append([index])
    return chunks


def behind_chunks(
    computed: Sequence[int], lengths: Sequence[int], max_tokens: int, *, spread: float = math.inf
) -> list[list[int]]:
    """The same of sequences of which so many tokens are to be computed, the last ones of ``lengths``."""
    sizes = [max(new, -(-length // LOOKS_FOR_A_TOKEN)) for new, length in zip(computed, lengths, strict=True)]
    return prefill_chunks(sizes, max_tokens, spread=spread)
