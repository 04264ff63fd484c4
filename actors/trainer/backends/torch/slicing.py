"""This rank's part of a layout whose rows several ranks share (``attention/context.py``)."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from actors.trainer.backends.torch.attention.context import ContextRanks, TokenShare
from actors.trainer.backends.torch.packing import Layout


def sliced(layout: Layout, ranks: ContextRanks, device: str) -> tuple[Layout, TokenShare]:
    """The layout with the rows and tokens that this rank predicts, and which tokens these are.

    A token belongs to the rank that has the position before it, so none is lost where slices meet. Ids, positions and
    tree stay whole, padded to slices of equal size; the causal order of a padded layout becomes a tree.
    """
    rows, length = layout.input_ids.shape
    width = ranks.padded(length)
    columns = np.arange(width)
    positions, ends = layout.position_ids, layout.ends
    if positions is None or ends is None:
        positions = np.tile(columns[:length], (rows, 1))
        ends = np.full((rows, length), length)
    more = ((0, 0), (0, width - length))
    behind = np.broadcast_to(columns[length:] + 1, (rows, width - length))  # each sees itself, and nobody sees it
    mine = ranks.positions(width)
    place = np.full(width, -1)
    place[mine] = np.arange(mine.size)
    row, column = np.divmod(layout.rows, length)
    here = place[column] >= 0
    kept = np.flatnonzero(here[layout.row_of])
    part = dataclasses.replace(
        layout,
        input_ids=np.pad(layout.input_ids, more),
        position_ids=np.pad(positions, more),
        ends=np.concatenate([ends, behind], axis=1),
        rows=row[here] * mine.size + place[column[here]],
        row_of=(np.cumsum(here) - 1)[layout.row_of[kept]],
        source=None if layout.source is None else layout.source // length * width + layout.source % length,
        ranks=ranks,
    )
    return part, TokenShare(ranks, layout.row_of.size, torch.from_numpy(kept).to(device))
