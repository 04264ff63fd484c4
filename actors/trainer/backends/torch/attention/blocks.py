"""Attention over packed rows in blocks of query rows: no mask of [L, L] is ever made.

             keys 0 …        s    e
    block 1  ▒▒▒▒                     the keys that no row of a block may see are left out of it,
    block 2  ▒▒▒▒▒▒▒▒                 and of the others a mask of [rows, keys] says who sees whom
    block 3  ▒▒▒▒    ▒▒▒▒
    block 4  ▒▒▒▒    ▒▒▒▒▒▒▒▒

Each block is a call of transformers' SDPA. The backward pass computes a block once more instead of keeping its mask and
the copies of its keys, so a layer keeps its queries, keys and values and nothing that grows faster than the row.
Gradients of keys are summed in float32, in the order of the blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

QUERY_ROWS: Final = 512
"""Most query rows of a block."""
LEAST_ROWS: Final = 128
"""Rows from which on a block ends where a branch ends, so that the next one need not see it."""
_TREE: Final = "headrace_tree"

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(query, key, value, mask) → [1, rows, heads, D]."""


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Query rows [start, end) of a row, and the keys that any of them may see."""

    start: int
    end: int
    keys: np.ndarray  # int64[K], ascending


def query_blocks(
    ends: np.ndarray,
    positions: np.ndarray | None = None,
    window: int | None = None,
    span: tuple[int, int] | None = None,
) -> list[QueryBlock]:
    """Cut a row with these ``ends`` [L], or its query rows [start, end) of ``span``, into blocks.

    With a ``window`` a position sees that many tokens of its path, itself included; ``positions`` [L] count along it.
    """
    blocks: list[QueryBlock] = []
    borders, (start, last) = np.unique(ends), span or (0, len(ends))
    while start < last:
        end = min(start + QUERY_ROWS, last)
        border = np.searchsorted(borders, start + LEAST_ROWS)
        if border < len(borders) and borders[border] < end:
            end = int(borders[border])
        seen = ends[:end] > start
        if window is not None and positions is not None:
            seen &= positions[:end] > positions[start:end].min() - window
        blocks.append(QueryBlock(start, end, np.flatnonzero(seen)))
        start = end
    return blocks


def keys_computed(blocks: list[QueryBlock]) -> int:
    """Pairs of a query and a key that are computed."""
    return sum((block.end - block.start) * len(block.keys) for block in blocks)


class Tree:
    """Holds the trees of R rows on a device, and how they are cut into blocks."""

    def __init__(self, ends: np.ndarray, positions: np.ndarray, device: str) -> None:
        self._ends, self._positions = ends, positions
        self._device = device
        self.ends = torch.from_numpy(ends).to(device)  # int64[R, L]
        self.positions = torch.from_numpy(positions).to(device)
        self.spans: tuple[tuple[int, int], ...] = ((0, ends.shape[1]),)
        """[start, end) of the query rows that are computed here."""
        self.is_short = ends.shape[1] <= QUERY_ROWS
        """Whether each row is one block: then all rows are computed together."""
        self._cut: dict[int | None, list[tuple[int, slice, int, int, Tensor]]] = {}
        self._whole: dict[int | None, Tensor] = {}

    def blocks(self, window: int | None) -> list[tuple[int, slice, int, int, Tensor]]:
        """(row, its place among the queries here, start, end, keys) of each block; a model has one window, or two."""
        if window not in self._cut:
            cut = self._cut[window] = []
            for row, (ends, positions) in enumerate(zip(self._ends, self._positions, strict=True)):
                before = 0
                for block in (block for span in self.spans for block in query_blocks(ends, positions, window, span)):
                    here = slice(before, before + block.end - block.start)
                    keys = torch.from_numpy(block.keys).to(self._device)
                    cut.append((row, here, block.start, block.end, keys))
                    before = here.stop
        return self._cut[window]

    def gathered(self, own: Tensor) -> Tensor:
        """Keys or values of the whole row, from those that were computed here: all of them."""
        return own

    def scattered(self, whole: Tensor) -> Tensor:
        """Gradients of those that were computed here, from what the queries here give for the whole row."""
        return whole

    def whole(self, window: int | None) -> Tensor:
        """bool[R, 1, L, L]: which positions each one sees, of short rows."""
        if window not in self._whole:
            i = torch.arange(self.ends.shape[1], device=self.ends.device)
            seen = (i <= i[:, None]) & (i[:, None] < self.ends[:, None])
            if window is not None:
                seen &= self.positions[:, :, None] - self.positions[:, None] < window
            self._whole[window] = seen[:, None]
        return self._whole[window]

    def mask(self, row: int, start: int, end: int, keys: Tensor, window: int | None) -> Tensor:
        """bool[1, 1, rows, K]: which keys each query row sees."""
        query = torch.arange(start, end, device=keys.device)[:, None]
        seen = (keys <= query) & (query < self.ends[row, keys])
        if window is not None:
            seen &= self.positions[row, start:end, None] - self.positions[row, keys] < window
        return seen[None, None]


def marked(tree: Tree) -> Tensor:
    """``tree`` as a mask argument that models hand on: int64[R, 1, 1, L], which no other attention function accepts."""
    mask = tree.ends[:, None, None]
    setattr(mask, _TREE, tree)
    return mask


def attend_in_blocks(
    module: nn.Module,
    query: Tensor,  # [R, heads, L, D]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention [R, L, heads, D] under the tree that ``attention_mask`` is marked with; without one, SDPA.

    Raises:
        NotImplementedError: scores have a bias for each pair of positions.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    tree: Tree | None = getattr(attention_mask, _TREE, None)
    if tree is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **more)
    if more.get("position_bias") is not None:
        raise NotImplementedError("attention in blocks has no biases of pairs of positions")

    if tree.is_short:
        return sdpa_attention_forward(module, query, key, value, tree.whole(sliding_window), **more)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return sdpa_attention_forward(module, query, key, value, mask, **more)[0]

    return _InBlocks.apply(query, key, value, tree, sliding_window, attend), None  # type: ignore[no-untyped-call]


class _InBlocks(torch.autograd.Function):
    """Computes a block at a time, in the backward pass again."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, tree: Tree, window: int | None, attend: Attend
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.how = tree, window, attend
        key, value = tree.gathered(key), tree.gathered(value)
        rows, heads, length, _ = query.shape
        out = query.new_empty(rows, length, heads, value.shape[-1])
        for row, here, start, end, keys in tree.blocks(window):
            mask = tree.mask(row, start, end, keys, window)
            part = slice(row, row + 1)
            out[part, here] = attend(
                query[part, :, here], key[part].index_select(2, keys), value[part].index_select(2, keys), mask
            )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value = ctx.saved_tensors
        tree, window, attend = ctx.how
        kind, key, value = key.dtype, tree.gathered(key), tree.gathered(value)
        of_query = torch.empty_like(query)
        of_key, of_value = (torch.zeros_like(one, dtype=torch.float32) for one in (key, value))
        for row, here, start, end, keys in tree.blocks(window):
            mask = tree.mask(row, start, end, keys, window)
            part = slice(row, row + 1)
            inputs = [query[part, :, here], key[part].index_select(2, keys), value[part].index_select(2, keys)]
            with torch.enable_grad():
                inputs = [one.detach().requires_grad_() for one in inputs]
                out = attend(*inputs, mask)
            found = torch.autograd.grad(out, inputs, grads[0][part, here])
            of_query[part, :, here] = found[0]
            of_key[part].index_add_(2, keys, found[1].float())
            of_value[part].index_add_(2, keys, found[2].float())
        of_key, of_value = tree.scattered(of_key), tree.scattered(of_value)
        return of_query, of_key.to(kind), of_value.to(kind), None, None, None
