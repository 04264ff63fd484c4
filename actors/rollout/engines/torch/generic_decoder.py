"""Continuous batching for any HF causal LM whose cache is keys and values, through the model's own ``forward``.

All rows end at the same column, so to the model each call looks like one of ``generate`` with left padding, which every
architecture supports (also those that count distances by column: ALiBi, sliding windows):

    column     0 1 2 3 4 5                      a new row is padded on the left when it joins,
    row 0      . . a b c d ─▶ e                 columns that no row uses any more are cut off on the left,
    row 1      x y z a b c ─▶ d                 and all rows grow by one column a step

Invariants
- Row i occupies the last ``lengths[i]`` columns, as the attention mask says; positions count within the row.
- Known prefixes are cut so that all rows of a batch compute equally many tokens and so end at the same column.
- The cache is an HF ``DynamicCache`` without sliding layers: the model's own mask narrows the view.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from actors.models.routers import Recorder
from actors.rollout.engines.torch.prefill import behind_chunks, prefill_chunks
from actors.rollout.engines.torch.prefix_cache import KnownPrefixes
from actors.rollout.engines.torch.side_adapters import SideAdapters
from actors.rollout.errors import ModelUnreadable

_SPREAD: Final = 16
"""Most known tokens of a row that are computed again, so that all rows of a batch compute equally many."""
_BY_LENGTH: Final = ("dynamic", "longrope")
"""Kinds of rotary embedding that depend on the sequence's length, so that no other sequence can share its keys."""


class GenericDecoder:
    """Implements ``Decoder``; see the module's docstring."""

    def __init__(
        self, model: Any, *, prefill_tokens: int, recorder: Recorder | None = None, side: SideAdapters | None = None
    ) -> None:
        """``recorder``: of the experts that tokens go to; ``side``: adapters that rows may have. None: none."""
        self._side = side or SideAdapters(model)
        self._model, self._prefill_tokens, self._recorder = model, prefill_tokens, recorder
        self.routes = np.zeros((0, recorder.width_bytes if recorder else 0), np.uint8)
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._keeps_last = "logits_to_keep" in accepted
        if getattr(model.config, "is_encoder_decoder", False) or not getattr(model, "_supports_cache_class", True):
            raise ModelUnreadable(
                f"{type(model).__name__} has no key-value cache of its own: the torch engine needs one"
            )
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._lengths = np.zeros(0, np.int64)
        self.shares_prefixes = not _turns_by_length(model.config)
        self.prefilled_tokens = 0

    @property
    def rows(self) -> int:
        return len(self._lengths)

    def parts(self, row: int) -> list[Tensor]:
        first = self._columns - int(self._lengths[row])
        return [part[row, :, first:] for layer in self._layers for part in layer]

    @property
    def _columns(self) -> int:
        return self._layers[0][0].shape[2] if self._layers else 0

    def weights_changed(self) -> None:
        """Nothing is derived from the weights."""

    def clear(self) -> None:
        self._layers, self._lengths, self.routes = [], np.zeros(0, np.int64), self.routes[:0]

    def arrange(self, sources: NDArray[np.int64], targets: NDArray[np.int64], rows: int) -> None:
        if rows == 0:
            self.clear()
            return
        order = np.arange(rows)
        order[targets] = sources
        self._lengths, self.routes = self._lengths[order], self.routes[order]
        cut = self._columns - int(self._lengths.max())
        index = self._tensor(order)
        self._layers = [(keys[:, :, cut:][index], values[:, :, cut:][index]) for keys, values in self._layers]

    def prefill(
        self,
        sequences: Sequence[NDArray[np.int32]],
        known: KnownPrefixes | None = None,
        adapters: NDArray[np.int64] | None = None,
    ) -> Tensor:
        logits: list[Tensor] = [torch.empty(0)] * len(sequences)
        layers: list[list[tuple[Tensor, Tensor]]] = [[]] * len(sequences)
        routes = np.zeros((len(sequences), self.routes.shape[1]), np.uint8)
        lengths = np.array([len(sequence) for sequence in sequences], np.int64)
        begun = np.array([known.tokens(i) if known else 0 for i in range(len(sequences))], np.int64)
        new, rest = np.flatnonzero(begun == 0), np.flatnonzero(begun)
        chunks = [new[chunk] for chunk in prefill_chunks(lengths[new].tolist(), self._prefill_tokens)]
        parts = behind_chunks(
            (lengths - begun)[rest].tolist(), lengths[rest].tolist(), self._prefill_tokens, spread=_SPREAD
        )
        for chunk in [*chunks, *(rest[part] for part in parts)]:
            size = lengths[chunk]
            width = int((size - begun[chunk]).max())  # the last ``width`` tokens of each row are computed
            ids = np.zeros((len(chunk), width), np.int64)
            for row, i in enumerate(chunk):
                ids[row, width - min(width, lengths[i]) :] = sequences[i][-width:]
            past = (
                _at_the_right(known.read(chunk.tolist()), np.maximum(size - width, 0))
                if known and begun[chunk[0]]
                else []
            )
            with self._side.beside(None if adapters is None else adapters[chunk]):
                output, computed, routes[chunk] = self._forward(ids, size, past)
            self.prefilled_tokens += int(np.minimum(size, width).sum())
            for row, i in enumerate(chunk):
                logits[i] = output[row]
                first = computed[0][0].shape[2] - int(size[row])
                layers[i] = [(keys[row, :, first:], values[row, :, first:]) for keys, values in computed]
        self._lengths = np.concatenate([self._lengths, lengths])
        self.routes = np.concatenate([self.routes, routes])
        self._join(layers)
        return torch.stack(logits)

    def _join(self, joining: list[list[tuple[Tensor, Tensor]]]) -> None:
        """Pad the present rows and the joining ones on the left to one width and stack them."""
        width = int(self._lengths.max())
        present = len(self._lengths) - len(joining)
        merged: list[tuple[Tensor, Tensor]] = []
        for number, parts in enumerate(joining[0]):
            pair: list[Tensor] = []
            for kind in (0, 1):
                like = parts[kind]
                stacked = like.new_zeros(len(self._lengths), like.shape[0], width, like.shape[2])
                if present:
                    held = self._layers[number][kind]
                    shown = min(width, held.shape[2])
                    stacked[:present, :, width - shown :] = held[:, :, held.shape[2] - shown :]
                for row, layers in enumerate(joining, start=present):
                    stacked[row, :, width - layers[number][kind].shape[1] :] = layers[number][kind]
                pair.append(stacked)
            merged.append((pair[0], pair[1]))
        self._layers = merged

    def decode(
        self, tokens: NDArray[np.int64], lengths: NDArray[np.int64], adapters: NDArray[np.int64] | None = None
    ) -> Tensor:
        with self._side.beside(adapters):
            logits, self._layers, self.routes = self._forward(tokens[:, None], lengths, self._layers)
        self._lengths = lengths.copy()
        return logits

    def _forward(
        self, ids: NDArray[np.int64], lengths: NDArray[np.int64], past: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]], NDArray[np.uint8]]:
        """Run ids [n, q] behind ``past``; lengths [n] include them. Returns logits [n, vocab], the new cache, and where
        the last tokens went (``routes``).
        """
        cache = DynamicCache()
        for number, (keys, values) in enumerate(past):
            cache.update(keys, values, number)
        width = ids.shape[1] + (past[0][0].shape[2] if past else 0)
        mask = np.arange(width) >= width - lengths[:, None]
        extra: dict[str, Any] = {}
        if self._takes_positions:
            positions = np.arange(width - ids.shape[1], width) - (width - lengths[:, None])
            extra["position_ids"] = self._tensor(np.maximum(positions, 0))
        if self._keeps_last:
            extra["logits_to_keep"] = 1
        output = self._model(
            input_ids=self._tensor(ids),
            attention_mask=self._tensor(mask.astype(np.int64)),
            past_key_values=cache,
            use_cache=True,
            **extra,
        )
        layers: list[Any] = cache.layers
        if not layers or any(getattr(layer, "keys", None) is None for layer in layers):
            raise ModelUnreadable(
                f"{type(self._model).__name__} keeps a state that is no key-value cache: not for the torch engine"
            )
        routes = self._recorder.newest(len(ids)) if self._recorder else np.zeros((len(ids), 0), np.uint8)
        return output.logits[:, -1], [(layer.keys, layer.values) for layer in layers], routes

    def _tensor(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._model.device)


def _at_the_right(parts: list[Tensor], shown: NDArray[np.int64]) -> list[tuple[Tensor, Tensor]]:
    """Right-align the first ``shown`` tokens of each row of ``parts`` [n, heads, tokens, d]; pairs by layer."""
    width, padded = int(shown.max()), list[Tensor]()
    if not width:
        return []
    for part in parts:
        moved = part.new_zeros(*part.shape[:2], width, part.shape[3])
        for row, tokens in enumerate(shown.tolist()):
            moved[row, :, width - tokens :] = part[row, :, :tokens]
        padded.append(moved)
    return list(zip(padded[::2], padded[1::2], strict=True))


def _turns_by_length(config: Any) -> bool:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return any(kind in str(rope) for kind in _BY_LENGTH)
