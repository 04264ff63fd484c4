"""Adapters that one model serves side by side: what each adds to the rows that are of it, and to no others.

    rows of a batch       0   1   2   3   4   5        y = x Wᵀ for all rows at once, then for each adapter
    their adapters        –   7   7   –   9   7        y[1, 2, 5] += scale₇ · (x[1, 2, 5] A₇ᵀ) B₇ᵀ
                                                       y[4]       += scale₉ · (x[4] A₉ᵀ) B₉ᵀ

So do S-LoRA (Sheng et al. 2023) and Punica (Chen et al. 2023), with kernels of their own.

Invariants
- The model's weights are not changed; a row without an adapter costs nothing more and gets the bits that it gets alone.
- What a row gets depends on the row and on its adapter. Rows of one adapter are multiplied together, filled up to a
  multiple of ``ROWS``, since BLAS takes other kernels for few or odd rows; what is no number in one row stays there.
- A number names one adapter for ever: the prefix cache knows by it whose keys and values it has.

A merged adapter (``weight_loading.py``) costs a token nothing, but there is one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.models.adapted_layers import expert_weights
from actors.models.adapter import AdapterSpec, tensor_names
from actors.models.matmul import linear
from actors.rollout.engine import WeightTensors
from actors.rollout.engines.adapter_tensors import AdapterTensors
from actors.rollout.engines.torch.weight_loading import as_tensor

ROWS: Final = 16
"""Multiple of rows that are multiplied together: with it, in float32 with one thread, a row has the same bits in any
batch on every processor that was tried. A matrix of rank 1 needs a multiple of 4, others at least 4 to 16 rows."""


class Part(NamedTuple):
    """Says that a linear layer, by its name, makes the columns ``start`` … ``stop`` - 1 of an output."""

    layer: str
    start: int
    stop: int


class _Pair(NamedTuple):
    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scale: float


class AdaptedRows:
    """Adds to the outputs of a batch what the adapters of its rows do.

    Args:
        count: number of rows.
        groups: for each adapter its matrices by layer, and its rows, int64.
    """

    def __init__(
        self, count: int, groups: Sequence[tuple[Mapping[str, _Pair], NDArray[np.int64]]], device: torch.device
    ) -> None:
        self._count, self._groups, self._device = count, groups, device
        self._places: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Tokens of a row → for each group the places of its tokens in the batch, and the same, filled up."""

    def add(self, y: Tensor, x: Tensor, parts: Sequence[Part]) -> None:
        """Add to outputs ``y`` [count * t, out] of inputs ``x`` [count * t, in], which have t tokens of each row."""
        for (pairs, _), (places, filled) in zip(self._groups, self._of(len(x) // self._count), strict=True):
            present = [(part, pair) for part in parts if (pair := pairs.get(part.layer)) is not None]
            some = x[filled] if present else x
            for (_, start, stop), (a, b, scale) in present:
                added, columns = linear(linear(some, a), b)[: len(places)], y[:, start:stop]
                columns[places] = columns[places].add_(added, alpha=scale)

    def _of(self, width: int) -> list[tuple[Tensor, Tensor]]:
        if (known := self._places.get(width)) is None:
            known = self._places[width] = []
            for _, rows in self._groups:
                places = (rows[:, None] * width + np.arange(width)).ravel()
                filled = np.pad(places, (0, -len(places) % ROWS), mode="edge")
                known.append((torch.from_numpy(places).to(self._device), torch.from_numpy(filled).to(self._device)))
        return known


class SideAdapters:
    """Holds adapters of one model by number; 0 is none. Every call runs on the engine's thread."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.possible = not expert_weights(model)
        """Whether the model's linear layers see all rows: those of experts see the tokens that go to an expert."""
        self._held: dict[int, dict[str, _Pair]] = {}
        self._hooked: set[str] = set()
        self._now: AdaptedRows | None = None
        """Rows of the model's ``forward`` that is under way."""

    def __contains__(self, number: int) -> bool:
        return number == 0 or number in self._held

    def add(self, number: int, tensors: WeightTensors, dtypes: Mapping[str, str], spec: AdapterSpec) -> None:
        """Hold an adapter.

        Raises:
            WeightsMismatch: the tensors are not those of an adapter of ``spec``.
            ModelUnreadable: the model lacks layers that ``spec`` names.
        """
        expected = AdapterTensors.of_model(self._model, spec, str(self._model.dtype).removeprefix("torch."))
        expected.check(tensors, dtypes)
        pairs: dict[str, _Pair] = {}
        for place, layer in expected.layers.items():
            a, b = (as_tensor(tensors[key], layer.weight.dtype).to(layer.weight.device) for key in tensor_names(place))
            pairs[layer.name] = _Pair(a, b, spec.scale)
            if layer.name not in self._hooked:
                layer.owner.register_forward_hook(partial(self._add_to_output, layer.name))
                self._hooked.add(layer.name)
        self._held[number] = pairs

    def drop(self, number: int) -> None:
        """Forget an adapter, if it is held."""
        self._held.pop(number, None)

    def rows(self, numbers: NDArray[np.int64] | None) -> AdaptedRows | None:
        """Rows of the adapters ``numbers``, int64[rows]; None if no row has any."""
        if numbers is None or not numbers.any():
            return None
        present = np.unique(numbers[numbers != 0]).tolist()
        groups = [(self._held[number], np.flatnonzero(numbers == number)) for number in present]
        return AdaptedRows(len(numbers), groups, self._model.device)

    @contextmanager
    def beside(self, numbers: NDArray[np.int64] | None) -> Iterator[None]:
        """Have the model's own ``forward`` add what the adapters of its rows do."""
        self._now = self.rows(numbers)
        try:
            yield
        finally:
            self._now = None

    def _add_to_output(self, layer: str, _: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if self._now is not None:
            y, x = output.view(-1, output.shape[-1]), inputs[0].reshape(-1, inputs[0].shape[-1])
            self._now.add(y, x, [Part(layer, 0, y.shape[1])])
