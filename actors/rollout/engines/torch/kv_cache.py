"""The keys of running rows in one tensor and their values in another: [layers, rows, heads, tokens, head_dim] each.

Invariants
- Memory grows by doubling with the rows and lengths in use, never beyond ``max_rows`` × ``max_tokens``.
- Contents behind a row's length are undefined but finite; readers mask them.
- Rows are never set aside, so as many run as find memory at full length (``slots_that_fit``).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from actors.host.memory_account import free_bytes
from actors.rollout.engine import EngineSpec, slots_of

_SHARE: Final = 0.5
"""Share of the free memory that the cache may take in the end, so that the half as large one from which it is copied
fits beside it, and what a step computes too."""


def slots_that_fit(model: Any, spec: EngineSpec) -> int:
    """Number of sequences for which the free memory of the model's device suffices, at least 1."""
    share = spec.memory_share if model.device.type == "cpu" else 1.0
    free = free_bytes(str(model.device)) * share - spec.prefix_cache_bytes
    return slots_of(_SHARE * free / token_bytes(model), spec.max_context_tokens, sets_aside=False)


def token_bytes(model: Any) -> int:
    """Bytes of the keys and values of one token, in all layers."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_size * model.dtype.itemsize


class KvCache:
    """Holds keys and values in preallocated memory that grows in buckets."""

    def __init__(self, *, layers: int, heads: int, head_dim: int, max_rows: int, max_tokens: int, like: Tensor) -> None:
        self.heads = heads
        self._layers, self._head_dim = layers, head_dim
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._dtype, self._device = like.dtype, like.device
        self._moves = 0
        self.clear()

    @property
    def place(self) -> int:
        """Number that changes whenever the tensors move to other addresses."""
        return self._moves

    def clear(self) -> None:
        """Give all memory back."""
        self._moves += 1
        self._keys = self._values = self._zeros(0, 0)

    def _zeros(self, rows: int, width: int) -> Tensor:
        return torch.zeros(
            self._layers, rows, self.heads, width, self._head_dim, dtype=self._dtype, device=self._device
        )

    @property
    def rows(self) -> int:
        return self._keys.shape[1]

    @property
    def width(self) -> int:
        """Number of tokens that a row can hold now."""
        return self._keys.shape[3]

    def reserve(self, rows: int, width: int, *, used_rows: int) -> None:
        """Make room for ``rows`` × ``width`` tokens; the first ``used_rows`` rows keep their contents."""
        if rows <= self.rows and width <= self.width:
            return
        new_rows = self.rows if rows <= self.rows else min(max(rows, 2 * self.rows, 8), self._max_rows)
        new_width = self.width if width <= self.width else min(max(width, 2 * self.width, 32), self._max_tokens)
        used, kept = min(used_rows, self.rows), self.width
        self._moves += 1
        for name in ("_keys", "_values"):
            grown = self._zeros(new_rows, new_width)
            grown[:, :used, :, :kept] = getattr(self, name)[:, :used]
            setattr(self, name, grown)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy row ``sources[j]``, which may come several times, onto row ``targets[j]``; the two sets are disjoint."""
        for part in (self._keys, self._values):
            for layer in part:  # one at a time, since copied rows are in memory twice for a moment
                layer[targets] = layer[sources]

    def write_prefix(self, layer: int, targets: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write ``keys[j]`` and ``values[j]``, [heads, tokens, head_dim], to the beginning of row ``targets[j]``."""
        width = min(keys.shape[2], self.width)
        self._keys[layer][:, :, :width].index_copy_(0, targets, keys[:, :, :width])
        self._values[layer][:, :, :width].index_copy_(0, targets, values[:, :, :width])

    def begin(self, targets: Tensor, keys: Tensor, values: Tensor) -> None:
        """As ``write_prefix``, but for all layers at once: [n, layers, heads, tokens, head_dim]."""
        self._keys[:, targets, :, : keys.shape[3]] = keys.movedim(0, 1)
        self._values[:, targets, :, : values.shape[3]] = values.movedim(0, 1)

    def parts(self, row: int) -> list[Tensor]:
        """Views of the keys and of the values of a row: [layers, heads, width, head_dim]."""
        return [self._keys[:, row], self._values[:, row]]

    def of_rows(self, layer: int, targets: Tensor, span: int) -> tuple[Tensor, Tensor]:
        """A copy of the first ``span`` tokens of some rows: [n, heads, span, head_dim]."""
        return self._keys[layer][targets, :, :span], self._values[layer][targets, :, :span]

    def places(self, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        """Flat indices of (row, head, ``positions[i]``) for all heads: int64[n * heads]. Row: ``rows[i]``, or i."""
        if rows is None:
            firsts = torch.arange(positions.shape[0] * self.heads, device=positions.device)
        else:
            firsts = (rows.unsqueeze(1) * self.heads + torch.arange(self.heads, device=rows.device)).view(-1)
        return firsts * self.width + positions.repeat_interleave(self.heads)

    def store(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store n tokens at ``places``: [n, heads, head_dim]."""
        flat = (self._keys[layer].view(-1, self._head_dim), self._values[layer].view(-1, self._head_dim))
        flat[0].index_copy_(0, places, keys.reshape(-1, self._head_dim))
        flat[1].index_copy_(0, places, values.reshape(-1, self._head_dim))

    def append(
        self, layer: int, places: Tensor, keys: Tensor, values: Tensor, rows: int, span: int
    ) -> tuple[Tensor, Tensor]:
        """Store one token of each row at ``places``; returns the first ``span``: [rows * heads, span, head_dim]."""
        self.store(layer, places, keys, values)
        count, shape = rows * self.heads, (self.rows * self.heads, self.width, self._head_dim)
        return self._keys[layer].view(shape)[:count, :span], self._values[layer].view(shape)[:count, :span]
