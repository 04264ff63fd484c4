"""What passes between host and device within a step without a wait of the host: inputs there, statistics not back.

micro-batch*   arrays ─ pinned ─▶ device ─▶ loss, statistics ─ added up there
step           the norm of the gradient, and the sums ─▶ host: the only waits
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from actors.trainer.backend import NO_STATS, MicroBatchStats


def on_device(array: np.ndarray, device: str) -> Tensor:
    """``array`` on ``device``; a copy from memory that is not pinned would wait for all that the device has to do."""
    tensor = torch.from_numpy(array)
    return tensor if device == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class DeviceSums:
    """Adds up some sums of ``MicroBatchStats`` where they are computed, in float64."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._total: Tensor | None = None

    def add(self, **sums: Tensor) -> None:
        """Add one micro-batch's, each a single number; always those of the same names."""
        new = torch.stack([one.detach().double() for one in sums.values()])
        self._names, self._total = tuple(sums), new if self._total is None else self._total + new

    def taken(self) -> MicroBatchStats:
        """The sums since this was last called. Waits for the device."""
        total, self._total = self._total, None
        found = [] if total is None else total.tolist()
        return dataclasses.replace(NO_STATS, **dict(zip(self._names, found, strict=False)))
