"""Lays out the sequences of a micro-batch for the forward pass: padded, or packed so that shared tokens count once.

    padded   [ prompt | response 1 | pad ]         every sibling carries the prompt
             [ prompt | response 2       ]

    packed   [ prompt A | a b c d | e f | x y | prompt B | ... ]        responses  a b c d   a b e f   x y  of prompt A
             [ prompt C | ...                            | pad ]
             a group is a tree in preorder: siblings that agree up to a token share that token;
             the mask lets each token see the path that leads to it, and nothing else; positions count along the path

Siblings of a group have the same prompt, and the more certain the policy, the longer their responses agree: a packed
row holds one copy of what they share. Groups that are laid into rows of about equal length save most of the padding, in
exchange for attention over longer rows. Which is cheaper depends on the lengths; ``choose`` decides by counting. Both
layouts give the same log-probabilities: the hidden state that predicts a token sees exactly the same tokens.
The tree comes from AReaL's tree training of agents, whose turns share their history; here siblings share prefixes.

The last token of a response predicts nothing that is needed, so neither layout computes it.
"""

from __future__ import annotations

import heapq
import sys
from dataclasses import dataclass
from typing import Final

import numpy as np

from actors.trainer.backend import MicroBatch
from actors.trainer.backends.torch.attention.blocks import LEAST_ROWS, QUERY_ROWS, keys_computed, query_blocks
from actors.trainer.backends.torch.attention.context import ContextRanks

ROW_TOKENS_MAX = 2048
"""Longest packed row under a dense mask, which grows with the square of it; a longer group is split into blocks."""
BLOCK_COST: Final = 1e6
"""Multiplications that the calls for one block of query rows are worth, whatever is in it."""
RECOMPUTED: Final = 9 / 7
"""Attention has two products of matrices in the forward pass and five in the backward; blocks repeat the first two."""
BLOCKS_A_ROW = (2, 3, 4, 6, 8)
"""Average numbers of blocks per row to try. With more, padding shrinks less and less, and attention costs more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A layout is the model's input: R rows of L positions, N predicted tokens, U positions that predict some."""

    input_ids: np.ndarray  # int64[R, L]
    rows: np.ndarray  # int64[U], ascending: index into [R * L] of the hidden states that predict
    row_of: np.ndarray  # int64[N], index into ``rows`` for each predicted token, tokens in row-major order
    position_ids: np.ndarray | None = None  # int64[R, L]
    used_tokens: np.ndarray  # int64[R], positions of a row before its padding
    source: np.ndarray | None = None
    """int64[B, T], index into [R * L] of the position that predicts each response token. None: rows are sequences."""
    ends: np.ndarray | None = None
    """int64[R, L], where the subtree of each position ends: i may see j if j <= i < ends[j]. None: causal."""
    ranks: ContextRanks | None = None
    """Ranks that share the rows (``slicing``): ``rows`` and ``row_of`` are this rank's alone, in its slices."""

    def here(self, column: np.ndarray) -> np.ndarray:
        """What this rank has of ``column`` [R, L]: all, or its slices."""
        return column if self.ranks is None else column[:, self.ranks.positions(column.shape[1])]

    @property
    def mask(self) -> np.ndarray:
        """bool[R, 1, L, L], True where position i may see position j: as large as the square of the row."""
        assert self.ends is not None, "a padded layout is causal"
        i = np.arange(self.ends.shape[1])
        return ((i[:, None] >= i) & (i[:, None] < self.ends[:, None, :]))[:, None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A block holds sequences of the batch after one copy of their common prompt, sorted by their tokens."""

    prompt_tokens: int
    members: tuple[int, ...]
    response_tokens: tuple[int, ...]
    """Response lengths, without the last token of each."""
    shared_tokens: tuple[int, ...]
    """Length of each response's common prefix with the member before it; 0 for the first."""

    @property
    def length(self) -> int:
        return self.prompt_tokens + sum(self.response_tokens) - sum(self.shared_tokens)


Row = tuple[Block, ...]
"""The blocks that one packed row holds."""


def padded(batch: MicroBatch, predicted: np.ndarray) -> Layout:
    """One sequence per row. ``predicted`` bool[B, T] says which tokens' log-probabilities are needed."""
    width = max(1, batch.input_ids.shape[1] - 1)
    row, t = np.nonzero(predicted)
    return Layout(
        input_ids=batch.input_ids[:, :width].astype(np.int64), rows=row * width + t - 1, row_of=np.arange(row.size),
        used_tokens=np.maximum(1, batch.lengths.astype(np.int64) - 1),
    )  # fmt: skip


def plan_blocks(batch: MicroBatch, *, row_tokens_max: int | None = None) -> list[Block]:
    """Group sequences by equal prompts, in order of first appearance, and split groups that are too long for a row.

    ``row_tokens_max``: by default as long as rows under a dense mask may be.
    """
    longest = ROW_TOKENS_MAX if row_tokens_max is None else row_tokens_max
    by_prompt: dict[bytes, list[int]] = {}
    for row, p in enumerate(batch.prompt_lengths.tolist()):
        by_prompt.setdefault(batch.input_ids[row, :p].tobytes(), []).append(row)
    blocks: list[Block] = []
    for members in by_prompt.values():
        blocks.extend(_plan_group(batch, members, longest))
    return blocks


def _plan_group(batch: MicroBatch, members: list[int], longest: int) -> list[Block]:
    """Sort members by their tokens, so that neighbours share the most and each is compared with only one other."""
    p = int(batch.prompt_lengths[members[0]])
    responses = {m: batch.input_ids[m, p : max(p, int(batch.lengths[m]) - 1)] for m in members}
    # bytes of big-endian numbers that are not negative have the order of the numbers
    keys = {m: tokens.astype(">u4").tobytes() for m, tokens in responses.items()}
    blocks: list[Block] = []
    current: list[tuple[int, int, int]] = []
    used, before = p, batch.input_ids[members[0], :0]
    for member in sorted(members, key=lambda m: (keys[m], m)):
        tokens = responses[member]
        shared = _common_prefix(before, tokens)
        if current and used + len(tokens) - shared > longest:
            blocks.append(_block(p, current))
            current, used, shared = [], p, 0
        current.append((member, len(tokens), shared))
        used += len(tokens) - shared
        before = tokens
    return [*blocks, _block(p, current)]


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n


def _block(p: int, members: list[tuple[int, int, int]]) -> Block:
    rows, sizes, shared = zip(*members, strict=True)
    return Block(prompt_tokens=p, members=rows, response_tokens=sizes, shared_tokens=shared)


def plan_rows(blocks: list[Block], hidden: int, *, row_tokens_max: int | None = None) -> list[Row]:
    """The cheapest of a few ways to lay ``blocks`` into rows: one per row, or about 2, 3, 4, 6 or 8 per row.

    Each way puts the longest block left into the shortest row (Graham's rule), so that rows get about equally long.
    """
    longest = ROW_TOKENS_MAX if row_tokens_max is None else row_tokens_max
    best: list[Row] = [(block,) for block in blocks]
    longest_first = sorted(range(len(blocks)), key=lambda i: (-blocks[i].length, i))
    for share in BLOCKS_A_ROW:
        rows = _balanced(blocks, longest_first, -(-len(blocks) // share))
        if _width(rows) <= max(longest, blocks[longest_first[0]].length) and _less(rows, best, hidden):
            best = rows
    return best


def _balanced(blocks: list[Block], longest_first: list[int], count: int) -> list[Row]:
    rows: list[list[Block]] = [[] for _ in range(count)]
    heap = [(0, r) for r in range(count)]
    for index in longest_first:
        used, r = heapq.heappop(heap)
        rows[r].append(blocks[index])
        heapq.heappush(heap, (used + blocks[index].length, r))
    return [tuple(row) for row in rows]


def _width(rows: list[Row]) -> int:
    return max(sum(block.length for block in row) for row in rows)


def _less(rows: list[Row], best: list[Row], hidden: int) -> bool:
    return _cost(len(rows), _width(rows), hidden) < _cost(len(best), _width(best), hidden)


def packed(batch: MicroBatch, predicted: np.ndarray, plan: list[Row]) -> Layout:
    """Lay ``plan`` out. The first token of every response is predicted by the last of its prompt."""
    width = _width(plan)
    shape = (len(plan), width)
    ids, positions = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    # where the subtree of a position ends; each padding position is its own tree, so that it sees itself
    ends = np.tile(np.arange(1, width + 1), (len(plan), 1))
    source = np.zeros(batch.input_ids.shape, dtype=np.int64)
    used = np.array([sum(block.length for block in row) for row in plan])
    for r, row in enumerate(plan):
        start = 0
        for block in row:
            _lay_out(batch, block, start, ids[r], positions[r], ends[r], source)
            source[list(block.members)] += r * width
            start += block.length
    rows, row_of = np.unique(source[predicted], return_inverse=True)
    return Layout(
        input_ids=ids, rows=rows, row_of=row_of, position_ids=positions, ends=ends, used_tokens=used, source=source
    )


def _lay_out(
    batch: MicroBatch,
    block: Block,
    start: int,
    ids: np.ndarray,
    positions: np.ndarray,
    ends: np.ndarray,
    source: np.ndarray,
) -> None:
    """Write one block into a row [L] from ``start`` on, and into ``source`` the position that predicts each token."""
    p, end = block.prompt_tokens, start + block.prompt_tokens
    ids[start:end] = batch.input_ids[block.members[0], :p]
    positions[start:end] = np.arange(p)
    path = np.empty(0, dtype=np.int64)  # positions of the previous member's tokens
    for member, size, shared in zip(block.members, block.response_tokens, block.shared_tokens, strict=True):
        ends[path[shared:]] = end  # the branch that this member does not take
        path = np.concatenate([path[:shared], np.arange(end, end + size - shared)])
        new = path[shared:]
        ids[new] = batch.input_ids[member, p + shared : p + size]
        positions[new] = np.arange(p + shared, p + size)
        source[member, p : p + 1] = start + p - 1  # an empty slice, where there is no response
        source[member, p + 1 : p + 1 + size] = path
        end += size - shared
    ends[start : start + p] = end
    ends[path] = end


def choose(batch: MicroBatch, predicted: np.ndarray, *, hidden: int, may_pack: bool, long_rows: bool = False) -> Layout:
    """The layout with fewer multiplications: 24 h² per token for the matrices, 4 h per token and key for attention.

    ``long_rows``: attention over packed rows computes in blocks, so rows may have any length (``row_attention``).
    """
    if not may_pack or batch.prompt_lengths.min() < 1:
        return padded(batch, predicted)
    rows, width = batch.input_ids.shape[0], batch.input_ids.shape[1] - 1
    if long_rows:
        return _cheapest_in_blocks(batch, predicted, hidden, _cost(rows, width, hidden, keys=width / 2))
    plan = plan_rows(plan_blocks(batch), hidden)
    if _cost(len(plan), _width(plan), hidden) < _cost(rows, width, hidden):
        return packed(batch, predicted, plan)
    return padded(batch, predicted)


def _cheapest_in_blocks(batch: MicroBatch, predicted: np.ndarray, hidden: int, of_padded: float) -> Layout:
    """Short rows under one dense mask, one row of everything in blocks, or ``padded``, where a query has half the keys.

    In one row nothing is padding, and keys of other groups cost nothing.
    """
    blocks = plan_blocks(batch, row_tokens_max=sys.maxsize)
    best, least = None, of_padded
    short = plan_rows(blocks, hidden, row_tokens_max=QUERY_ROWS)
    if _width(short) <= QUERY_ROWS and (cost := _cost(len(short), _width(short), hidden)) < least:
        best, least = packed(batch, predicted, short), cost
    length = sum(block.length for block in blocks)
    a_block = BLOCK_COST / hidden
    # a query has the keys of its own block at least; what cannot be cheaper need not be laid out
    if length > QUERY_ROWS and _cost(1, length, hidden, keys=LEAST_ROWS + a_block / LEAST_ROWS) < least:
        row = packed(batch, predicted, [tuple(blocks)])
        assert row.ends is not None
        cuts = query_blocks(row.ends[0])
        if _cost(1, length, hidden, keys=RECOMPUTED * keys_computed(cuts) / length) + len(cuts) * a_block < least:
            return row
    return best or padded(batch, predicted)


def _cost(rows: int, width: int, hidden: int, keys: float | None = None) -> float:
    """In units of 4 h multiplications; ``keys``: of each query, by default the whole row."""
    return rows * width * (6.0 * hidden + (width if keys is None else keys))
