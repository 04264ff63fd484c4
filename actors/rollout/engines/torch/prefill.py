"""Sequences of many lengths become padded batches, for both decoders of the torch engine."""

from __future__ import annotations

from collections.abc import Sequence


def prefill_chunks(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut sequences into padded batches of at most ``max_tokens`` (a longer one goes alone), by length."""
    chunks: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if chunks and lengths[index] * (len(chunks[-1]) + 1) <= max_tokens:
            chunks[-1].append(index)
        else:
            chunks.append([index])
    return chunks
