"""What a learning rule is. The policy loss itself is the same for all (``losses.py``): a sum over tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShape:
    """Counts all samples of a step, those of degenerate groups included: they are not computed, but they count."""

    samples: int
    response_tokens: int
    max_response_tokens: int
    """The limit of the job (``rollout.max_tokens``), not the longest that occurred."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    name: str
    advantages: Callable[[np.ndarray], np.ndarray]
    """float64[g] rewards of one group to float64[g] advantages, one for all tokens of a response; with a critic, its
    score, from which those of its tokens follow."""
    normaliser: Callable[[BatchShape], float]
    """The divisor of the summed token losses; at least 1."""
