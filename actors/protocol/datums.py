"""What a training call of explicit targets is about: datums, and what each loss wants to know of them.

    tokens    x0  x1  x2        the model's inputs, n of them
    targets   y0  y1  y2        y0 is predicted from x0, y1 from x0 and x1, ...; any tokens, not only the next input
    columns   a number for each target, by the names of ``LOSS_INPUTS``

Always true
- A datum says everything about itself: no loss looks at another one, so their order and their grouping do not matter.
- With targets [n, K] each position predicts K tokens, and each of them has its own numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np


class Datum(msgspec.Struct, frozen=True):
    """Holds one sequence of n tokens, what is predicted at each of them, and the numbers of a loss."""

    tokens: np.ndarray  # int32[n]
    targets: np.ndarray  # int32[n] or int32[n, K]
    columns: dict[str, np.ndarray]
    """float32 of the shape of ``targets``, by name. A loss reads those that it wants and no others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """Says what a loss of ``actors/trainer/learning/explicit_losses.py`` needs."""

    columns: tuple[str, ...]
    parameters: Mapping[str, float | None]
    """Parameters with the value that each has if it is not given; None: it has to be given."""
    many_targets: bool = False
    """Whether targets may be [n, K]."""


_SAMPLED: Final = ("logprobs", "advantages")
_BOUNDS: Final = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSS_INPUTS: Final[Mapping[str, LossInputs]] = {
    "cross_entropy": LossInputs(columns=("weights",), parameters={}, many_targets=True),
    "importance_sampling": LossInputs(columns=_SAMPLED, parameters={}),
    "ppo": LossInputs(columns=_SAMPLED, parameters=_BOUNDS),
    "cispo": LossInputs(columns=_SAMPLED, parameters=_BOUNDS),
    "dro": LossInputs(columns=_SAMPLED, parameters={"beta": None}),
    "gspo": LossInputs(columns=(*_SAMPLED, "sequence_ratio_mask"), parameters=_BOUNDS),
}
"""Losses by name."""
