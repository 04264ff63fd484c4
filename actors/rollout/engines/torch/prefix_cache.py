"""Keys and values of prompts, kept in blocks of tokens for later prompts that begin alike.

    rows of the decoder's cache ── keep ─▶ pool: block 0 │ block 1 │ block 2 │ …  ── read ─▶ rows of later prompts
                                              ▲ which place holds which tokens: ``prefix_index.py``

Invariants
- Keys and values that are read were computed for exactly these tokens behind exactly the tokens before them, with the
  same adapter (by its number; 0: none) and the present weights: ``forget`` is called whenever the weights change, also
  if running sequences keep theirs.
- The pool grows by doubling, never beyond ``max_bytes``; while it grows, a part of it is in memory twice.
- Contents behind the known tokens are undefined but finite: blocks of the same sequence fill the gap.

A decoder hands over *parts*, tensors [..., tokens, head_dim]; it alone knows which of them are keys or values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.rollout.engines.prefix_index import Chain, PrefixIndex

BLOCK_TOKENS: Final = 32
"""Tokens of a block. Where prompts diverge, each needs its own block, so larger ones take more memory; smaller ones
mean more look-ups. Behind a system prompt of 200 tokens a tiny model took 38 ms with 32, 46 with 16, 39 with 64."""
LEAST_TOKENS: Final = 8
"""Length of the shortest prefix worth reading from the cache: many tokenizers begin every prompt with one token."""
_NOTHING: Final = Chain([], 0)
_FIRST_BLOCKS: Final = 64
"""Number of blocks that the pool begins with."""


class PrefixCache:
    """Keeps prompt prefixes within ``max_bytes``; 0: it keeps nothing."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._index: PrefixIndex | None = None
        """Index of the blocks; None until the first ``keep`` tells how many bytes a block has."""
        self._blocks_max = 0
        self._pool: list[Tensor] = []  # each [blocks, ..., BLOCK_TOKENS, head_dim]

    @property
    def on(self) -> bool:
        """Whether it keeps anything."""
        return self._max_bytes > 0

    def match(self, tokens: NDArray[np.int32], adapter: int = 0) -> Chain:
        """The longest known prefix of ``tokens``; never its last token, whose logits are needed."""
        if self._index is None:
            return _NOTHING
        chain = self._index.match(tokens[:-1], adapter)
        return chain if chain.tokens >= LEAST_TOKENS else _NOTHING

    def keep(self, tokens: NDArray[np.int32], parts: Sequence[Tensor], adapter: int = 0) -> None:
        """Keep the first ``len(tokens)`` tokens of ``parts``, which belong to ``tokens``."""
        if not self.on:
            return
        if self._index is None:
            token_bytes = sum(part[..., :1, :].nbytes for part in parts)
            self._blocks_max = self._max_bytes // (BLOCK_TOKENS * token_bytes)
            if not self._blocks_max:  # there is not even room for one
                self._max_bytes = 0
                return
            self._index = PrefixIndex(BLOCK_TOKENS, self._blocks_max)
            self._pool = [part.new_zeros(0, *part.shape[:-2], BLOCK_TOKENS, part.shape[-1]) for part in parts]
        known, places = self._index.extend(tokens, adapter)
        self._reserve(len(self._index))
        whole = len(tokens) // BLOCK_TOKENS - known
        for number, place, count in _runs(places[:whole], known):
            start, stop = number * BLOCK_TOKENS, (number + count) * BLOCK_TOKENS
            for pool, part in zip(self._pool, parts, strict=True):
                blocks = part[..., start:stop, :].unflatten(-2, (count, BLOCK_TOKENS)).movedim(-3, 0)
                pool[place : place + count].copy_(blocks)
        for place in places[whole:]:
            for pool, part in zip(self._pool, parts, strict=True):
                rest = part[..., (known + whole) * BLOCK_TOKENS : len(tokens), :]
                pool[place][..., : rest.shape[-2], :].copy_(rest)

    def _reserve(self, blocks: int) -> None:
        present = len(self._pool[0])
        if blocks <= present:
            return
        room = min(max(blocks, 2 * present, _FIRST_BLOCKS), self._blocks_max)
        for number, part in enumerate(self._pool):
            grown = part.new_zeros(room, *part.shape[1:])
            grown[:present] = part
            self._pool[number] = grown

    def read(self, chains: Sequence[Chain]) -> list[Tensor]:
        """The parts of ``chains``, none of which is empty: [n, ..., tokens of the longest, head_dim] each."""
        longest, most = max(len(chain.places) for chain in chains), max(chain.tokens for chain in chains)
        stand_ins = ([chain.places[0]] * (longest - len(chain.places)) for chain in chains)
        places = np.array([[*chain.places, *more] for chain, more in zip(chains, stand_ins, strict=True)], np.int64)
        index = torch.from_numpy(places.ravel()).to(self._pool[0].device)
        blocks = (pool.index_select(0, index).unflatten(0, places.shape) for pool in self._pool)
        # [n, blocks, ..., tokens, d] before
        return [part.movedim(1, -3).flatten(-3, -2)[..., :most, :] for part in blocks]

    def forget(self) -> None:
        """Forget all prefixes, since the weights have changed; the memory stays for new ones."""
        if self._index is not None:
            self._index.clear()

    def release(self) -> None:
        """Forget all prefixes, and free the memory."""
        self.forget()
        self._pool = [part[:0].clone() for part in self._pool]


def _runs(places: list[int], first: int) -> Iterator[tuple[int, int, int]]:
    """Runs of blocks with consecutive places, to be copied at once: first block's number, its place, and the count."""
    at = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end] != places[end - 1] + 1:
            yield first + at, places[at], end - at
            at = end


@dataclass(frozen=True, slots=True)
class KnownPrefixes:
    """Holds the prefixes of some sequences that a cache has."""

    cache: PrefixCache
    chains: list[Chain]
    """Known nodes of each sequence; if empty, the sequence is computed from its first token on."""

    def tokens(self, sequence: int) -> int:
        return self.chains[sequence].tokens

    def read(self, sequences: Sequence[int]) -> list[Tensor]:
        """As ``PrefixCache.read``."""
        return self.cache.read([self.chains[i] for i in sequences])
