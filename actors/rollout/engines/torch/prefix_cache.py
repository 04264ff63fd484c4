"""Keys and values of prompts' beginnings, kept by blocks of tokens for the prompts that begin alike.

    rows of the decoder's cache ── keep ─▶ pool: block 0 │ block 1 │ block 2 │ …  ── read ─▶ rows of later prompts
                                              ▲ places, and which of them hold what: ``prefix_index.py``

Invariants
- What is read for a sequence was computed for exactly these tokens behind exactly the tokens before them, with the
  weights of now: ``forget`` is called whenever those change, whatever becomes of running sequences.
- The pool grows by doubling with what is kept, never beyond ``max_bytes``; while it grows, a part of it is there twice.
- Contents behind what was asked for are undefined but finite: blocks of the same sequence stand in for missing ones.

What a decoder gives to keep are *parts*, tensors [..., tokens, head_dim]: it alone knows what stands for what.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.rollout.engines.prefix_index import PrefixIndex

BLOCK_TOKENS: Final = 16
"""Tokens of a block: as many as the fused decoder pads prefills to. Half of one is lost where prompts part."""
_FIRST_BLOCKS: Final = 64
"""Blocks that the pool begins with."""


class PrefixCache:
    """Keeps the beginnings of prompts within ``max_bytes``; 0: it keeps nothing."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._index: PrefixIndex | None = None
        """None until it is known how many bytes a block has."""
        self._blocks_max = 0
        self._pool: list[Tensor] = []  # each [blocks, ..., BLOCK_TOKENS, head_dim]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._pool)

    @property
    def on(self) -> bool:
        """Whether it keeps anything."""
        return self._max_bytes > 0

    def match(self, tokens: NDArray[np.int32]) -> list[int]:
        """The places of the blocks that ``tokens`` begins with; its last token is never in one, for it is computed."""
        return [] if self._index is None else self._index.match(tokens, (len(tokens) - 1) // BLOCK_TOKENS)

    def keep(self, tokens: NDArray[np.int32], parts: Sequence[Tensor]) -> None:
        """Keep the whole blocks of ``tokens``, which ``parts`` begin with."""
        if not self.on or len(tokens) < BLOCK_TOKENS:
            return
        if self._index is None:
            block_bytes = sum(part[..., :BLOCK_TOKENS, :].nbytes for part in parts)
            self._blocks_max = self._max_bytes // block_bytes
            if not self._blocks_max:  # not even one has room
                self._max_bytes = 0
                return
            self._index = PrefixIndex(BLOCK_TOKENS, self._blocks_max)
            self._pool = [part.new_zeros(0, *part.shape[:-2], BLOCK_TOKENS, part.shape[-1]) for part in parts]
        known, places = self._index.extend(tokens)
        self._reserve(len(self._index))
        for number, place, count in _runs(places, known):
            start, stop = number * BLOCK_TOKENS, (number + count) * BLOCK_TOKENS
            for pool, part in zip(self._pool, parts, strict=True):
                blocks = part[..., start:stop, :].unflatten(-2, (count, BLOCK_TOKENS)).movedim(-3, 0)
                pool[place : place + count].copy_(blocks)

    def _reserve(self, blocks: int) -> None:
        present = len(self._pool[0])
        if blocks <= present:
            return
        room = min(max(blocks, 2 * present, _FIRST_BLOCKS), self._blocks_max)
        for number, part in enumerate(self._pool):
            grown = part.new_zeros(room, *part.shape[1:])
            grown[:present] = part
            self._pool[number] = grown

    def read(self, chains: Sequence[Sequence[int]]) -> list[Tensor]:
        """The parts of ``chains``, none of which is empty: [n, ..., tokens of the longest, head_dim] each."""
        longest = max(len(chain) for chain in chains)
        places = np.array([[*chain, *[chain[0]] * (longest - len(chain))] for chain in chains], np.int64)
        index = torch.from_numpy(places.ravel()).to(self._pool[0].device)
        blocks = (pool.index_select(0, index).unflatten(0, places.shape) for pool in self._pool)
        return [part.movedim(1, -3).flatten(-3, -2) for part in blocks]  # [n, blocks, ..., tokens, d] before

    def forget(self) -> None:
        """The weights have changed: nothing that was kept may be read. The memory stays for what comes."""
        if self._index is not None:
            self._index.clear()

    def release(self) -> None:
        """Forget all, and give the memory back."""
        self.forget()
        self._pool = [part[:0].clone() for part in self._pool]


def _runs(places: list[int], first: int) -> Iterator[tuple[int, int, int]]:
    """Blocks whose places follow each other, which are copied at once: number, place, and count of each run."""
    at = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end] != places[end - 1] + 1:
            yield first + at, places[at], end - at
            at = end


@dataclass(frozen=True, slots=True)
class KnownPrefixes:
    """Says of some sequences what a cache has of their beginnings."""

    cache: PrefixCache
    chains: list[list[int]]
    """The places of each sequence's blocks; empty: it is to be computed from its first token on."""

    def tokens(self, sequence: int) -> int:
        return len(self.chains[sequence]) * BLOCK_TOKENS

    def read(self, sequences: Sequence[int]) -> list[Tensor]:
        """As ``PrefixCache.read``."""
        return self.cache.read([self.chains[i] for i in sequences])
