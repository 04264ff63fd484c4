"""Decoding steps as CUDA graphs: recorded for a shape that comes again, then replayed with a single launch.

    shape (rows, span) ── first times ─▶ computed as usual       again ─▶ recorded, replayed        further ─▶ replayed

A step of a small model is a thousand kernels of a few microseconds each. Launching them takes the host several times as
long as running them takes the GPU.

Invariants
- A graph reads and writes the addresses that it was recorded with: of the weights and of the cache. Weights stay where
  they are; the decoder forgets all graphs where one has moved. When the cache has moved (``place``), all are forgotten
  before any is replayed.
- A replayed step computes what the recorded one did, kernel by kernel.
- The result is overwritten by the next step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

COMPUTED_FIRST: Final = 2
"""Times that a shape is computed before it is recorded: recording takes about as long as computing."""


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # int64[2, rows]: tokens, positions
    logits: Tensor


Compute = Callable[[Tensor, Tensor, int], Tensor]
"""Function from tokens and positions, int64[rows] each, and a span to logits; it never waits for the device."""


class StepGraphs:
    """Keeps the recorded graphs of one decoder on one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        """Stream on which steps are recorded: one for all, since cuBLAS keeps a workspace for each stream."""
        self._pool = torch.cuda.graph_pool_handle()
        """Memory for intermediate results, which all graphs share."""
        self._seen: Counter[tuple[int, int]] = Counter()
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        self._place = -1

    def step(
        self, compute: Compute, tokens: NDArray[np.int64], positions: NDArray[np.int64], span: int, *, place: int
    ) -> Tensor:
        """Logits as ``compute`` returns them, which the next step overwrites. ``place``: the cache's ``place``."""
        if place != self._place:
            self.clear()
            self._place = place
        shape, inputs = (len(tokens), span), torch.from_numpy(np.stack([tokens, positions]))
        recorded = self._recorded.get(shape)
        if recorded is None:
            self._seen[shape] += 1
            on_card = inputs.to(self._device)
            if self._seen[shape] <= COMPUTED_FIRST:
                return compute(on_card[0], on_card[1], span)
            recorded = self._recorded[shape] = self._record(compute, on_card, span)
        else:
            recorded.inputs.copy_(inputs)
        recorded.graph.replay()
        return recorded.logits

    def _record(self, compute: Compute, inputs: Tensor, span: int) -> _Recorded:
        """Record ``compute`` without running it; other threads' work is not recorded."""
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                logits = compute(inputs[0], inputs[1], span)
            finally:
                graph.capture_end()
        before.wait_stream(self._stream)
        return _Recorded(graph, inputs, logits)

    def clear(self) -> None:
        """Forget all graphs, and free the memory that they hold."""
        if self._recorded:  # a pool is gone with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        self._recorded.clear()
        self._seen.clear()
