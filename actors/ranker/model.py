"""The model that predicts lengths: a protocol, so that the ranker runs under virtual time as well.

Kinds: ``encoder.py``, a small transformer, made on the spot or given; ``simulated.py``, a memory at a modelled cost.

Invariants (``tests/contracts/test_length_model_contract.py``)
- ``fit`` is one bounded slice of work; the ranker repeats it and answers questions in between.
- Work runs off the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class LengthPair:
    """Pairs a prompt with the mean length of its responses: one example to learn from."""

    prompt_ids: np.ndarray  # int32[p]
    response_tokens: float


class LengthModel(Protocol):
    """Maps prompts to expected response tokens."""

    async def start(self) -> int:
        """Make the model; returns how often earlier lives refreshed it, if they kept its state, else 0."""
        ...

    async def score(self, prompts: Sequence[np.ndarray]) -> np.ndarray:
        """float64[p] expected response tokens of prompts, int32[…] each."""
        ...

    async def fit(self, pairs: Sequence[LengthPair]) -> float:
        """Take one slice of gradient steps on ``pairs``; returns the mean loss."""
        ...

    async def keep(self, refreshes: int) -> None:
        """Keep the state after so many refreshes for the next life; some kinds cannot."""
        ...

    async def close(self) -> None: ...
