"""How the sequences of a micro-batch are laid out for the forward pass: padded, or with shared prompts computed once.

    padded   [ prompt | response 1 | pad ]         every sibling carries the prompt
             [ prompt | response 2       ]

    packed   [ prompt | response 1 | response 2 | pad ]
             positions go on from the prompt in every response, and a mask hides the responses from each other

Siblings of a group have the same prompt, so a packed row saves g - 1 prompts of compute and most of the padding, in
exchange for attention over a longer row. Which is cheaper depends on the lengths; ``choose`` decides by counting.
Both layouts give the same log-probabilities: the hidden state that predicts a token sees exactly the same tokens.

The last token of a response predicts nothing that is asked for, so neither layout computes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actors.trainer.backend import MicroBatch

ROW_TOKENS_MAX = 2048
"""A packed row ends here, for its mask grows with the square; a group that needs more gets several rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What the model is given. R rows of L positions, N predicted tokens."""

    input_ids: np.ndarray  # int64[R, L]
    rows: np.ndarray  # int64[N], index into [R * L] of the hidden state that predicts each token, in row-major order
    position_ids: np.ndarray | None = None  # int64[R, L]
    mask: np.ndarray | None = None
    """bool[R, 1, L, L], True where position i may see position j. None: causal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRow:
    """Which sequences of the batch lie in one row, behind their common prompt."""

    prompt_tokens: int
    members: tuple[int, ...]
    response_tokens: tuple[int, ...]
    """Without the last token of each."""

    @property
    def length(self) -> int:
        return self.prompt_tokens + sum(self.response_tokens)


def padded(batch: MicroBatch, predicted: np.ndarray) -> Layout:
    """One sequence a row. ``predicted`` bool[B, T] says which tokens are asked for."""
    width = max(1, batch.input_ids.shape[1] - 1)
    row, t = np.nonzero(predicted)
    return Layout(input_ids=batch.input_ids[:, :width].astype(np.int64), rows=row * width + t - 1)


def plan_rows(batch: MicroBatch) -> list[PackedRow]:
    """Group sequences by equal prompts, in order of first appearance, and split groups that are too long."""
    by_prompt: dict[bytes, list[int]] = {}
    for row, p in enumerate(batch.prompt_lengths.tolist()):
        by_prompt.setdefault(batch.input_ids[row, :p].tobytes(), []).append(row)
    rows: list[PackedRow] = []
    for members in by_prompt.values():
        p = int(batch.prompt_lengths[members[0]])
        current: list[int] = []
        used = p
        for member in members:
            size = max(0, int(batch.lengths[member]) - p - 1)
            if current and used + size > ROW_TOKENS_MAX:
                rows.append(_row(batch, p, current))
                current, used = [], p
            current.append(member)
            used += size
        rows.append(_row(batch, p, current))
    return rows


def _row(batch: MicroBatch, p: int, members: list[int]) -> PackedRow:
    sizes = tuple(max(0, int(batch.lengths[member]) - p - 1) for member in members)
    return PackedRow(prompt_tokens=p, members=tuple(members), response_tokens=sizes)


def packed(batch: MicroBatch, predicted: np.ndarray, plan: list[PackedRow]) -> Layout:
    """Lay ``plan`` out. The first token of every response is predicted by the last of the shared prompt."""
    width = max(row.length for row in plan)
    shape = (len(plan), width)
    ids, positions = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    segments = np.full(shape, -1, dtype=np.int32)  # 0 the prompt, 1.. the responses, -1 padding
    source = np.zeros(batch.input_ids.shape, dtype=np.int64)
    for r, row in enumerate(plan):
        p = row.prompt_tokens
        ids[r, :p] = batch.input_ids[row.members[0], :p]
        positions[r, :p] = np.arange(p)
        segments[r, :p] = 0
        start = p
        for segment, (member, size) in enumerate(zip(row.members, row.response_tokens, strict=True), start=1):
            end = start + size
            ids[r, start:end] = batch.input_ids[member, p : p + size]
            positions[r, start:end] = np.arange(p, p + size)
            segments[r, start:end] = segment
            source[member, p] = r * width + p - 1
            source[member, p + 1 : p + 1 + size] = np.arange(r * width + start, r * width + end)
            start = end
    return Layout(input_ids=ids, rows=source[predicted], position_ids=positions, mask=_mask(segments))


def _mask(segments: np.ndarray) -> np.ndarray:
    """Position i sees the prompt and its own segment, up to itself. Padding sees itself, so that no row is empty."""
    width = segments.shape[1]
    earlier = np.tril(np.ones((width, width), dtype=np.bool_))
    key = segments[:, None, :]
    visible = (key == segments[:, :, None]) | (key == 0)
    return (visible & earlier | np.eye(width, dtype=np.bool_))[:, None]


def choose(batch: MicroBatch, predicted: np.ndarray, *, hidden: int, may_pack: bool) -> Layout:
    """The cheaper layout, by multiplications: 24 h² a token for the matrices, 4 h a token and key for attention."""
    if not may_pack or batch.prompt_lengths.min() < 1:
        return padded(batch, predicted)
    plan = plan_rows(batch)
    rows, width = len(plan), max(row.length for row in plan)
    if _cost(rows, width, hidden) < _cost(batch.input_ids.shape[0], batch.input_ids.shape[1] - 1, hidden):
        return packed(batch, predicted, plan)
    return padded(batch, predicted)


def _cost(rows: int, width: int, hidden: int) -> float:
    return rows * width * (6.0 * hidden + width)
