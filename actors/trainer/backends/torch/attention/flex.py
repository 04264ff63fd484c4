"""Attention over packed rows by torch's ``flex_attention``, which skips tiles of the scores that nobody sees.

    ends[R, L] ─ largest and smallest of each tile of keys ─▶ tiles seen in part, tiles seen as a whole ─▶ BlockMask

torch's own ``create_block_mask`` asks for each pair of positions, which takes a dense mask unless it is compiled. The
tiles follow from ``ends``: a tile of keys before a tile of queries is seen if the largest of its ends lies behind the
first query, and as a whole if the smallest lies behind the last.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

TILE: Final = 128
"""Rows and keys of a tile, as in torch."""


def block_mask(ends: np.ndarray, device: str) -> Any:
    """The BlockMask of rows with these ``ends`` int64[R, L]."""
    from torch.nn.attention.flex_attention import BlockMask

    rows, length = ends.shape
    tiles = -(-length // TILE)
    # behind the row: trees of their own, which no query of the row sees
    behind = np.arange(length, tiles * TILE) + 1
    padded = np.concatenate([ends, np.broadcast_to(behind, (rows, len(behind)))], axis=1)
    by_tile = padded.reshape(rows, 1, tiles, TILE)
    first = np.arange(tiles)[:, None] * TILE
    before = first > first.T  # bool[query tiles, key tiles]
    seen = (before & (by_tile.max(-1)[:, :, None] > first)) | np.eye(tiles, dtype=np.bool_)
    whole = before & (by_tile.min(-1)[:, :, None] >= np.minimum(first + TILE, length))
    where = torch.from_numpy(padded).to(device)

    def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < where[row, key])

    partly, fully = (_ordered(np.broadcast_to(kind, seen.shape), device) for kind in (seen & ~whole, whole))
    return BlockMask.from_kv_blocks(
        *partly, *fully, BLOCK_SIZE=(TILE, TILE), mask_mod=sees, seq_lengths=(length, length)
    )


def _ordered(tiles: np.ndarray, device: str) -> tuple[Tensor, Tensor]:
    """How many tiles of keys each tile of queries has, int32[R, 1, Q], and which: these first, int32[R, 1, Q, K]."""
    order = np.argsort(~tiles, axis=-1, kind="stable").astype(np.int32)
    return torch.from_numpy(tiles.sum(-1).astype(np.int32)).to(device), torch.from_numpy(order).to(device)


def attend_by_flex(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **more: Any
) -> tuple[Tensor, Tensor | None]:
    """flex_attention under a BlockMask; under another mask, or none, SDPA."""
    from torch.nn.attention.flex_attention import BlockMask
    from transformers.integrations.flex_attention import flex_attention_forward
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    attend: Any = flex_attention_forward if isinstance(attention_mask, BlockMask) else sdpa_attention_forward
    return attend(module, query, key, value, attention_mask, **more)
