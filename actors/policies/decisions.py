"""What policies decide. The scheduler carries decisions out; it never changes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class AssignSamples:
    """``rows`` of ``step`` are to be handed to ``worker`` in one message."""

    worker: str
    step: int
    rows: np.ndarray  # int32[n]


Decision = AssignSamples
