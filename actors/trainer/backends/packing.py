"""How the sequences of a micro-batch are laid out for the forward pass: padded, or with shared prompts computed once.

    padded   [ prompt | response 1 | pad ]         every sibling carries the prompt
             [ prompt | response 2       ]

    packed   [ prompt A | response 1 | response 2 | prompt B | response 3 ]
             [ prompt C | response 4 | response 5 | response 6      | pad ]
             positions begin anew at every prompt and go on from it in every response; a mask shows each response its
             own prompt and itself, and nothing else

Siblings of a group have the same prompt, so a packed row saves g - 1 prompts of compute, and groups that are laid into
rows of about equal length save most of the padding, in exchange for attention over longer rows. Which is cheaper
depends on the lengths; ``choose`` decides by counting. Both layouts give the same log-probabilities: the hidden state
that predicts a token sees exactly the same tokens.

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
"""On average, as tried. More saves less and less padding, and attention costs more and more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What the model is given. R rows of L positions, N predicted tokens."""

    input_ids: np.ndarray  # int64[R, L]
    rows: np.ndarray  # int64[N], index into [R * L] of the hidden state that predicts each token, in row-major order
    position_ids: np.ndarray | None = None  # int64[R, L]
    mask: np.ndarray | None = None
    """bool[R, 1, L, L], True where position i may see position j. None: causal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Sequences of the batch that lie behind their common prompt."""

    prompt_tokens: int
    members: tuple[int, ...]
    response_tokens: tuple[int, ...]
    """Without the last token of each."""

    @property
    def length(self) -> int:
        return self.prompt_tokens + sum(self.response_tokens)


Row = tuple[Block, ...]
"""What one packed row holds."""


def padded(batch: MicroBatch, predicted: np.ndarray) -> Layout:
    """One sequence a row. ``predicted`` bool[B, T] says which tokens are asked for."""
    width = max(1, batch.input_ids.shape[1] - 1)
    row, t = np.nonzero(predicted)
    return Layout(input_ids=batch.input_ids[:, :width].astype(np.int64), rows=row * width + t - 1)


def plan_blocks(batch: MicroBatch) -> list[Block]:
    """Group sequences by equal prompts, in order of first appearance, and split groups that are too long for a row."""
    by_prompt: dict[bytes, list[int]] = {}
    for row, p in enumerate(batch.prompt_lengths.tolist()):
        by_prompt.setdefault(batch.input_ids[row, :p].tobytes(), []).append(row)
    blocks: list[Block] = []
    for members in by_prompt.values():
        p = int(batch.prompt_lengths[members[0]])
        current: list[int] = []
        used = p
        for member in members:
            size = max(0, int(batch.lengths[member]) - p - 1)
            if current and used + size > ROW_TOKENS_MAX:
                blocks.append(_block(batch, p, current))
                current, used = [], p
            current.append(member)
            used += size
        blocks.append(_block(batch, p, current))
    return blocks


def _block(batch: MicroBatch, p: int, members: list[int]) -> Block:
    sizes = tuple(max(0, int(batch.lengths[member]) - p - 1) for member in members)
    return Block(prompt_tokens=p, members=tuple(members), response_tokens=sizes)


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
    # numbered within a row, -1 is padding; a root is the segment of the prompt that a position may see
    segments, roots = np.full(shape, -1, dtype=np.int32), np.full(shape, -1, dtype=np.int32)
    source = np.zeros(batch.input_ids.shape, dtype=np.int64)
    for r, row in enumerate(plan):
        start = segment = 0
        for block in row:
            p, root, first = block.prompt_tokens, segment, start
            end = start + p
            ids[r, start:end] = batch.input_ids[block.members[0], :p]
            positions[r, start:end] = np.arange(p)
            segments[r, start:end] = root
            roots[r, start : start + block.length] = root
            for member, size in zip(block.members, block.response_tokens, strict=True):
                start, end, segment = end, end + size, segment + 1
                ids[r, start:end] = batch.input_ids[member, p : p + size]
                positions[r, start:end] = np.arange(p, p + size)
                segments[r, start:end] = segment
                source[member, p] = r * width + first + p - 1
                source[member, p + 1 : p + 1 + size] = np.arange(r * width + start, r * width + end)
            start, segment = end, segment + 1
    return Layout(input_ids=ids, rows=source[predicted], position_ids=positions, mask=_mask(segments, roots))


def _mask(segments: np.ndarray, roots: np.ndarray) -> np.ndarray:
    """Position i sees its prompt and its own segment, up to itself. Padding sees itself, so that no row is empty."""
    width = segments.shape[1]
    earlier = np.tril(np.ones((width, width), dtype=np.bool_))
    key = segments[:, None, :]
    visible = (key == segments[:, :, None]) | (key == roots[:, :, None])
    return (visible & earlier | np.eye(width, dtype=np.bool_))[:, None]


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
