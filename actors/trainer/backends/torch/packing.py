"""How the sequences of a micro-batch are laid out for the forward pass: padded, or what siblings share computed once.

    padded   [ prompt | response 1 | pad ]         every sibling carries the prompt
             [ prompt | response 2       ]

    packed   [ prompt A | a b c d | e f | x y | prompt B | ... ]        responses  a b c d   a b e f   x y  of prompt A
             [ prompt C | ...                            | pad ]
             a group is a tree in preorder: a token stands once for all siblings that have said the same up to it;
             a mask shows each token the path that leads to it, and nothing else; positions count along the path

Siblings of a group have the same prompt, and the more certain the policy, the longer they say the same: a packed row
saves all but one copy of that. Groups that are laid into rows of about equal length save most of the padding, in
exchange for attention over longer rows. Which is cheaper depends on the lengths; ``choose`` decides by counting. Both
layouts give the same log-probabilities: the hidden state that predicts a token sees exactly the same tokens.
Source of the tree: AReaL's tree training of agents, whose turns share their history; here siblings share theirs.

The last token of a response predicts nothing that is asked for, so neither layout computes it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from actors.trainer.backend import MicroBatch

ROW_TOKENS_MAX = 2048
"""A packed row ends here, for its mask grows with the square; a group that needs more gets several blocks."""
BLOCKS_A_ROW = (2, 3, 4, 6, 8)
"""Sequences in a row on average, as tried. More saves less and less padding, and attention costs more and more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Says what the model is given. R rows of L positions, N predicted tokens, U positions that predict one or more."""

    input_ids: np.ndarray  # int64[R, L]
    rows: np.ndarray  # int64[U], ascending: index into [R * L] of the hidden states that predict
    row_of: np.ndarray  # int64[N], index into ``rows`` for each predicted token, tokens in row-major order
    position_ids: np.ndarray | None = None  # int64[R, L]
    mask: np.ndarray | None = None
    """bool[R, 1, L, L], True where position i may see position j. None: causal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Names sequences of the batch that lie behind their common prompt, in the order of their tokens."""

    prompt_tokens: int
    members: tuple[int, ...]
    response_tokens: tuple[int, ...]
    """Response lengths, without the last token of each."""
    shared_tokens: tuple[int, ...]
    """Tokens at the front of each that are the same as the member's before; 0 for the first."""

    @property
    def length(self) -> int:
        return self.prompt_tokens + sum(self.response_tokens) - sum(self.shared_tokens)


Row = tuple[Block, ...]
"""The blocks that one packed row holds."""


def padded(batch: MicroBatch, predicted: np.ndarray) -> Layout:
    """One sequence a row. ``predicted`` bool[B, T] says which tokens are asked for."""
    width = max(1, batch.input_ids.shape[1] - 1)
    row, t = np.nonzero(predicted)
    return Layout(
        input_ids=batch.input_ids[:, :width].astype(np.int64), rows=row * width + t - 1, row_of=np.arange(row.size)
    )


def plan_blocks(batch: MicroBatch) -> list[Block]:
    """Group sequences by equal prompts, in order of first appearance, and split groups that are too long for a row."""
    by_prompt: dict[bytes, list[int]] = {}
    for row, p in enumerate(batch.prompt_lengths.tolist()):
        by_prompt.setdefault(batch.input_ids[row, :p].tobytes(), []).append(row)
    blocks: list[Block] = []
    for members in by_prompt.values():
        blocks.extend(_plan_group(batch, members))
    return blocks


def _plan_group(batch: MicroBatch, members: list[int]) -> list[Block]:
    """Neighbours in the order of their tokens share the most, so each needs to be compared with one other only."""
    p = int(batch.prompt_lengths[members[0]])
    responses = {m: batch.input_ids[m, p : max(p, int(batch.lengths[m]) - 1)].tolist() for m in members}
    blocks: list[Block] = []
    current: list[tuple[int, int, int]] = []
    used, before = p, list[int]()
    for member in sorted(members, key=lambda m: (responses[m], m)):
        tokens = responses[member]
        shared = _common_prefix(before, tokens)
        if current and used + len(tokens) - shared > ROW_TOKENS_MAX:
            blocks.append(_block(p, current))
            current, used, shared = [], p, 0
        current.append((member, len(tokens), shared))
        used += len(tokens) - shared
        before = tokens
    return [*blocks, _block(p, current)]


def _common_prefix(a: list[int], b: list[int]) -> int:
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))


def _block(p: int, members: list[tuple[int, int, int]]) -> Block:
    rows, sizes, shared = zip(*members, strict=True)
    return Block(prompt_tokens=p, members=rows, response_tokens=sizes, shared_tokens=shared)


def plan_rows(blocks: list[Block], hidden: int) -> list[Row]:
    """The cheapest of a few ways to lay ``blocks`` into rows: one a row, and about 2, 3, 4, 6 and 8 a row.

    Each way takes the longest block first and puts it into the shortest row (Graham's rule), so that rows end alike.
    """
    best: list[Row] = [(block,) for block in blocks]
    longest_first = sorted(range(len(blocks)), key=lambda i: (-blocks[i].length, i))
    for share in BLOCKS_A_ROW:
        rows = _balanced(blocks, longest_first, -(-len(blocks) // share))
        if _width(rows) <= max(ROW_TOKENS_MAX, blocks[longest_first[0]].length) and _less(rows, best, hidden):
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
    # where the tree below a position ends; padding is a tree of its own, so that it sees itself
    ends = np.tile(np.arange(1, width + 1), (len(plan), 1))
    source = np.zeros(batch.input_ids.shape, dtype=np.int64)
    for r, row in enumerate(plan):
        start = 0
        for block in row:
            _lay_out(batch, block, start, ids[r], positions[r], ends[r], source)
            source[list(block.members)] += r * width
            start += block.length
    rows, row_of = np.unique(source[predicted], return_inverse=True)
    return Layout(input_ids=ids, rows=rows, row_of=row_of, position_ids=positions, mask=_mask(ends))


def _lay_out(
    batch: MicroBatch,
    block: Block,
    start: int,
    ids: np.ndarray,
    positions: np.ndarray,
    ends: np.ndarray,
    source: np.ndarray,
) -> None:
    """Write one block from ``start`` on into a row [L], and into ``source`` which position of it predicts a token."""
    p, end = block.prompt_tokens, start + block.prompt_tokens
    ids[start:end] = batch.input_ids[block.members[0], :p]
    positions[start:end] = np.arange(p)
    path = np.empty(0, dtype=np.int64)  # where the tokens of the member before stand
    for member, size, shared in zip(block.members, block.response_tokens, block.shared_tokens, strict=True):
        ends[path[shared:]] = end  # the branch that this member does not take
        path = np.concatenate([path[:shared], np.arange(end, end + size - shared)])
        new = path[shared:]
        ids[new] = batch.input_ids[member, p + shared : p + size]
        positions[new] = np.arange(p + shared, p + size)
        source[member, p : p + 1] = start + p - 1  # of no column, where there is no response
        source[member, p + 1 : p + 1 + size] = path
        end += size - shared
    ends[start : start + p] = end
    ends[path] = end


def _mask(ends: np.ndarray) -> np.ndarray:
    """Position i sees position j where i lies in the tree below j, j itself included."""
    i = np.arange(ends.shape[1])
    return ((i[:, None] >= i) & (i[:, None] < ends[:, None, :]))[:, None]


def choose(batch: MicroBatch, predicted: np.ndarray, *, hidden: int, may_pack: bool) -> Layout:
    """The cheaper layout, by multiplications: 24 h² a token for the matrices, 4 h a token and key for attention."""
    if not may_pack or batch.prompt_lengths.min() < 1:
        return padded(batch, predicted)
    plan = plan_rows(plan_blocks(batch), hidden)
    if _cost(len(plan), _width(plan), hidden) < _cost(batch.input_ids.shape[0], batch.input_ids.shape[1] - 1, hidden):
        return packed(batch, predicted, plan)
    return padded(batch, predicted)


def _cost(rows: int, width: int, hidden: int) -> float:
    return rows * width * (6.0 * hidden + width)
