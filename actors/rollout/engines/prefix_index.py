"""Which beginnings of prompts are known: a trie whose nodes are blocks of tokens, least recently used first out.

    system prompt ─ ─ ─ question 1           tokens   s s s s │ s s a a │ a b . .
      place 0 ─┬─ place 1 ── place 2         block        0         1       not whole: not in the index
               └─ place 3                    another prompt that begins with block 0 branches off behind it

A node is known by the node before it and by its own tokens, compared as a whole, not by a hash of them: no two
different beginnings share a node. Each node has a place, a number below ``blocks_max``, where whoever uses the index
keeps what belongs to the block. The index knows neither versions nor what is kept: its user clears it when that is
worth nothing any more.

Invariants
- The blocks of a match are the beginning of the tokens that were asked for, in order and without a gap.
- Whenever a node is used, all before it are used after it: what goes first is the end of every chain that it is in.
- A place belongs to one node at a time. ``extend`` gives away places of others, never one of the chain that it extends.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np
from numpy.typing import NDArray

_ROOT: Final = -1
Node = tuple[int, bytes]
"""The place of the node before, and a block of tokens."""


class PrefixIndex:
    """Finds the longest known beginning of a sequence, in whole blocks."""

    def __init__(self, block_tokens: int, blocks_max: int) -> None:
        self.block_tokens, self._blocks_max = block_tokens, blocks_max
        self._places: dict[Node, int] = {}
        self._nodes: OrderedDict[int, Node] = OrderedDict()
        """Place → node, the least recently used first."""

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, tokens: NDArray[np.int32], blocks_most: int) -> list[int]:
        """The places of the blocks with which ``tokens`` begins, as far as they are known, ``blocks_most`` at most."""
        chain = list[int]()
        for block in _blocks(tokens, self.block_tokens)[:blocks_most]:
            place = self._places.get((chain[-1] if chain else _ROOT, block))
            if place is None:
                break
            chain.append(place)
        self._use(chain)
        return chain

    def extend(self, tokens: NDArray[np.int32]) -> tuple[int, list[int]]:
        """Take in the whole blocks of ``tokens``: how many of them were known, and the places of those behind them.

        Of a sequence with more blocks than there are places, the first ones are taken in.
        """
        blocks = _blocks(tokens, self.block_tokens)[: self._blocks_max]
        chain = self.match(tokens, len(blocks))
        known = len(chain)
        for block in blocks[known:]:
            place = self._free_place()
            node = (chain[-1] if chain else _ROOT, block)
            self._places[node], self._nodes[place] = place, node
            chain.append(place)
        self._use(chain)
        return known, chain[known:]

    def clear(self) -> None:
        """Nothing is known any more."""
        self._places.clear()
        self._nodes.clear()

    def _free_place(self) -> int:
        """One that has never been used, or else that of the node which has not been used for longest.

        A chain that is being extended has just been used, and is shorter than ``blocks_max``: it is none of its own.
        """
        if len(self._nodes) < self._blocks_max:
            return len(self._nodes)
        place, node = self._nodes.popitem(last=False)
        del self._places[node]
        return place

    def _use(self, chain: list[int]) -> None:
        """Note that these have been used, the first one last."""
        for place in reversed(chain):
            self._nodes.move_to_end(place)


def next_block(tokens: NDArray[np.int32], after: int, block_tokens: int) -> bytes:
    """The block of ``tokens`` that follows ``after`` blocks."""
    return _bytes(tokens[after * block_tokens : (after + 1) * block_tokens])


def _blocks(tokens: NDArray[np.int32], block_tokens: int) -> list[bytes]:
    """All whole blocks of ``tokens``."""
    raw, size = _bytes(tokens), 4 * block_tokens
    return [raw[at : at + size] for at in range(0, len(raw) // size * size, size)]


def _bytes(tokens: NDArray[np.int32]) -> bytes:
    return np.ascontiguousarray(tokens, np.int32).tobytes()
