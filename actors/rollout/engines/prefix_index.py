"""Which beginnings of prompts are known: a trie whose nodes are blocks of tokens, least recently used first out.

    system prompt ─ ─ ─ question 1           tokens   s s s s │ s s a a │ a b
      place 0 ─┬─ place 1 ── place 2         block       0    │    1    │  2, not whole: nothing follows it
               └─ place 3                    another question: block 0 is known, and s s of block 1

A node is known by the node before it and by its own tokens, compared as a whole, not by a hash of them: no two
different beginnings share a node. Each node has a place, a number below ``blocks_max``, where whoever uses the index
keeps what belongs to the block. The index knows neither versions nor what is kept: its user clears it when that is
worth nothing any more.

Invariants
- The tokens of a match are the beginning of those that were asked for, to the last one that any node has of it.
- Whenever a node is used, all before it are used after it: what goes first is the end of every chain that it is in.
- A place belongs to one node at a time. ``extend`` gives away places of others, never one of the chain that it extends.
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
    """The nodes that a sequence begins with."""

    places: list[int]
    tokens: int
    """How many tokens of the sequence they cover; of the last one's there may be more."""


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

    def match(self, tokens: NDArray[np.int32]) -> Chain:
        """The longest known beginning of ``tokens``."""
        blocks = self._cut(tokens)
        places = self._whole(blocks)
        covered = len(places) * self._block_bytes
        if len(places) < len(blocks):
            place, common = self._closest(places[-1] if places else _ROOT, blocks[len(places)])
            if common:
                places, covered = [*places, place], covered + common * _TOKEN_BYTES
        self._use(places)
        return Chain(places, covered // _TOKEN_BYTES)

    def extend(self, tokens: NDArray[np.int32]) -> tuple[int, list[int]]:
        """Take in the blocks of ``tokens``: how many of them were known, and the places of those behind them.

        Of a sequence with more blocks than there are places, the first ones are taken in.
        """
        blocks = self._cut(tokens)[: self._blocks_max]
        chain = self._whole(blocks)
        self._use(chain)
        known = len(chain)
        for block in blocks[known:]:
            before = chain[-1] if chain else _ROOT
            if len(block) < self._block_bytes and self._closest(before, block)[1] * _TOKEN_BYTES == len(block):
                break  # the beginning of a node that is there
            place = self._free_place()
            self._places[before, block], self._nodes[place] = place, (before, block)
            insort(self._following.setdefault(before, []), block)
            chain.append(place)
        self._use(chain)
        return known, chain[known:]

    def clear(self) -> None:
        """Nothing is known any more."""
        self._places.clear()
        self._nodes.clear()
        self._following.clear()

    def _cut(self, tokens: NDArray[np.int32]) -> list[bytes]:
        """``tokens`` in blocks; the last one may not be whole."""
        raw, size = np.ascontiguousarray(tokens, np.int32).tobytes(), self._block_bytes
        return [raw[at : at + size] for at in range(0, len(raw), size)]

    def _whole(self, blocks: list[bytes]) -> list[int]:
        """The places of the first ``blocks`` that are whole, and known as such."""
        places = list[int]()
        for block in blocks:
            place = self._places.get((places[-1] if places else _ROOT, block))
            if place is None or len(block) < self._block_bytes:
                break
            places.append(place)
        return places

    def _closest(self, before: int, block: bytes) -> tuple[int, int]:
        """The node behind ``before`` that begins most like ``block``, and how many tokens they have in common.

        It stands next to where ``block`` would stand among those that follow ``before``.
        """
        following = self._following.get(before, [])
        at = bisect_left(following, block)
        alike = [(_common_tokens(block, other), other) for other in following[max(0, at - 1) : at + 1]]
        common, other = max(alike, default=(0, b""))
        return (self._places[before, other], common) if common else (_ROOT, 0)

    def _free_place(self) -> int:
        """One that has never been used, or else that of the node which has not been used for longest.

        A chain that is being extended has just been used, and is shorter than ``blocks_max``: it is none of its own.
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
        """Note that these have been used, the first one last."""
        for place in reversed(chain):
            self._nodes.move_to_end(place)


def _common_tokens(one: bytes, other: bytes) -> int:
    return common_tokens(np.frombuffer(one, np.int32), np.frombuffer(other, np.int32))


def common_tokens(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """With how many tokens both begin."""
    most = min(len(one), len(other))
    differs = one[:most] != other[:most]
    return int(differs.argmax()) if differs.any() else most
