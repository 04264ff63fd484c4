"""An index of known prompt prefixes: a trie whose nodes are blocks of tokens, evicted least recently used first.

    system prompt ─ ─ ─ question 1           tokens   s s s s │ s s a a │ a b
      place 0 ─┬─ place 1 ── place 2         block       0    │    1    │  2, not whole: nothing follows it
               └─ place 3                    another question: block 0 is known, and s s of block 1

A node is identified by the node before it and by its own tokens, compared as a whole, not by a hash: no two different
prefixes share a node. Each node has a place, a number below ``blocks_max``, where the cache that uses the index keeps
the block's data. The index knows neither policy versions nor that data: the cache clears it when the data is outdated.
Sequences of different adapters share no node: each adapter, by its number, has a root of its own.

Invariants
- A match is the longest prefix of the given tokens that any nodes hold.
- Whenever a node is used, the nodes before it count as used later: so the end of a chain is evicted first.
- A place belongs to one node at a time. ``extend`` evicts other nodes, never one of the chain that it extends.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_ROOT: Final = -1
_TOKEN_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Chain:
    """Holds the nodes that match the beginning of a sequence."""

    places: list[int]
    tokens: int
    """Number of tokens of the sequence that the nodes cover; the last node may hold further tokens."""


class PrefixIndex:
    """Finds the longest known beginning of a sequence."""

    def __init__(self, block_tokens: int, blocks_max: int) -> None:
        self._block_bytes, self._blocks_max = block_tokens * _TOKEN_BYTES, blocks_max
        self._places: dict[tuple[int, bytes], int] = {}
        self._nodes: OrderedDict[int, tuple[int, bytes]] = OrderedDict()
        """Place → the place before it, and the node's tokens; the least recently used first."""
        self._following: dict[int, list[bytes]] = {}
        """Place → tokens of the nodes that follow it, sorted."""

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, tokens: NDArray[np.int32], adapter: int = 0) -> Chain:
        """The longest known beginning of ``tokens``."""
        blocks, root = self._cut(tokens), _ROOT - adapter
        places = self._whole(blocks, root)
        covered = len(places) * self._block_bytes
        if len(places) < len(blocks):
            place, common = self._closest(places[-1] if places else root, blocks[len(places)])
            if common:
                places, covered = [*places, place], covered + common * _TOKEN_BYTES
        self._use(places)
        return Chain(places, covered // _TOKEN_BYTES)

    def extend(self, tokens: NDArray[np.int32], adapter: int = 0) -> tuple[int, list[int]]:
        """Add the blocks of ``tokens``; returns how many of them were known, and the places of the new ones.

        Of a sequence with more blocks than there are places, only the first ones are added.
        """
        blocks, root = self._cut(tokens)[: self._blocks_max], _ROOT - adapter
        chain = self._whole(blocks, root)
        self._use(chain)
        known = len(chain)
        for block in blocks[known:]:
            before = chain[-1] if chain else root
            if len(block) < self._block_bytes and self._closest(before, block)[1] * _TOKEN_BYTES == len(block):
                break  # a known node begins with it
            place = self._free_place()
            self._places[before, block], self._nodes[place] = place, (before, block)
            insort(self._following.setdefault(before, []), block)
            chain.append(place)
        self._use(chain)
        return known, chain[known:]

    def clear(self) -> None:
        """Forget everything."""
        self._places.clear()
        self._nodes.clear()
        self._following.clear()

    def _cut(self, tokens: NDArray[np.int32]) -> list[bytes]:
        """``tokens`` in blocks; the last one may not be whole."""
        raw, size = np.ascontiguousarray(tokens, np.int32).tobytes(), self._block_bytes
        return [raw[at : at + size] for at in range(0, len(raw), size)]

    def _whole(self, blocks: list[bytes], root: int) -> list[int]:
        """The places of the leading ``blocks`` that are whole and known."""
        places = list[int]()
        for block in blocks:
            place = self._places.get((places[-1] if places else root, block))
            if place is None or len(block) < self._block_bytes:
                break
            places.append(place)
        return places

    def _closest(self, before: int, block: bytes) -> tuple[int, int]:
        """The node behind ``before`` that begins most like ``block``, and how many tokens they have in common.

        It is a neighbour of the position where ``block`` would be sorted in among those that follow ``before``.
        """
        following = self._following.get(before, [])
        at = bisect_left(following, block)
        alike = [(_common_tokens(block, other), other) for other in following[max(0, at - 1) : at + 1]]
        common, other = max(alike, default=(0, b""))
        return (self._places[before, other], common) if common else (_ROOT, 0)

    def _free_place(self) -> int:
        """A place that has never been used, or else that of the least recently used node.

        That node is never of the chain being extended, which has just been used and is shorter than ``blocks_max``.
        """
        if len(self._nodes) < self._blocks_max:
            return len(self._nodes)
        place, (before, block) = self._nodes.popitem(last=False)
        del self._places[before, block]
        following = self._following[before]
        del following[bisect_left(following, block)]
        if not following:
            del self._following[before]
        return place

    def _use(self, chain: list[int]) -> None:
        """Mark the nodes of ``chain`` as used, the first one last."""
        for place in reversed(chain):
            self._nodes.move_to_end(place)


def _common_tokens(one: bytes, other: bytes) -> int:
    return common_tokens(np.frombuffer(one, np.int32), np.frombuffer(other, np.int32))


def common_tokens(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Length of the prefix that both have in common."""
    most = min(len(one), len(other))
    differs = one[:most] != other[:most]
    return int(differs.argmax()) if differs.any() else most
