"""Context parallel: the ranks of a group share each row, so that none of them holds all of its activations.

    row of 4 slices a rank pair    rank 0   ▒▒▒▒░░░░░░░░▒▒▒▒      the first and the last, so that causal attention
                                   rank 1   ░░░░▒▒▒▒▒▒▒▒░░░░      is the same work for both
    in every layer    own queries; keys and values of the whole row, gathered for the time of its attention
    backward          gathered again; their gradients summed over the ranks, of which each keeps its slices'
    after the head    log-probabilities of all tokens on every rank, so that a loss may look at whole responses

Everything but attention computes each position by itself. The tree of a row (``blocks``) is known to every rank whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from actors.trainer.backends.torch.attention.blocks import Tree


@dataclass(frozen=True, slots=True)
class ContextRanks:
    """The ranks that share each row, as one of them sees them."""

    group: dist.ProcessGroup
    rank: int
    """Number of this rank within the group."""
    count: int

    def padded(self, length: int) -> int:
        """``length`` rounded up to a number of positions that all slices share evenly."""
        return -(-length // (2 * self.count)) * 2 * self.count

    def spans(self, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """[start, end) of the two slices that this rank has of a row of so many positions."""
        size = length // (2 * self.count)
        first, last = self.rank * size, (2 * self.count - 1 - self.rank) * size
        return (first, first + size), (last, last + size)

    def positions(self, length: int) -> np.ndarray:
        """int64[l], ascending: the positions of this rank's slices."""
        return np.concatenate([np.arange(*span) for span in self.spans(length)])

    def gathered(self, own: Tensor) -> Tensor:
        """[R, heads, L, D] of all ranks' slices [R, heads, l, D], in the order of the row."""
        parts = own.new_empty(self.count, *own.shape)
        dist.all_gather_into_tensor(parts, own[None].contiguous(), group=self.group)
        first, last = parts.chunk(2, dim=3)
        return torch.cat([*first, *reversed(last.unbind())], dim=2)

    def scattered(self, whole: Tensor) -> Tensor:
        """This rank's slices [R, heads, l, D] of the sum of all ranks' ``whole`` [R, heads, L, D]."""
        slices = whole.chunk(2 * self.count, dim=2)
        parts = torch.stack([torch.cat([slices[r], slices[-1 - r]], dim=2) for r in range(self.count)])
        own = parts.new_empty(1, *parts.shape[1:])
        dist.reduce_scatter_tensor(own, parts, group=self.group)
        return own[0]


class SharedTree(Tree):
    """Holds the trees of rows of which this rank computes its slices."""

    def __init__(self, ends: np.ndarray, positions: np.ndarray, device: str, ranks: ContextRanks) -> None:
        super().__init__(ends, positions, device)
        self._ranks = ranks
        self.spans = ranks.spans(ends.shape[1])
        self.is_short = False

    def gathered(self, own: Tensor) -> Tensor:
        return self._ranks.gathered(own)

    def scattered(self, whole: Tensor) -> Tensor:
        return self._ranks.scattered(whole)


@dataclass(frozen=True, slots=True)
class TokenShare:
    """Says which of N tokens are predicted at a position of this rank's."""

    ranks: ContextRanks
    count: int
    where: Tensor  # int64[n], ascending

    def of_all(self, own: Tensor) -> Tensor:
        """Numbers [..., N] of all tokens, from each rank's own [..., n].

        Every rank computes the same with them, so the gradient of its own is whole as it is.
        """
        return _OfAll.apply(own, self)  # type: ignore[no-untyped-call, no-any-return]


class _OfAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, share: TokenShare) -> Tensor:
        ctx.share = share
        whole = own.new_zeros(*own.shape[:-1], share.count)
        whole[..., share.where] = own
        dist.all_reduce(whole, group=share.ranks.group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0][..., ctx.share.where], None
