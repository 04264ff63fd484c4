"""A simulated length model: it remembers each prompt's newest length, and sleeps as long as its costs say."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from actors.ranker.model import LengthPair


class SimulatedLengthModel:
    """Implements ``LengthModel``; predicts the mean length for a prompt that it has not seen."""

    def __init__(self, *, score_s: float = 0.05, fit_s: float = 0.5) -> None:
        self._score_s, self._fit_s = score_s, fit_s
        self._lengths: dict[bytes, float] = {}

    async def start(self) -> int:
        """There is no model to build and no earlier state to load."""
        return 0

    async def score(self, prompts: Sequence[np.ndarray]) -> np.ndarray:
        await asyncio.sleep(self._score_s)
        mean = float(np.mean(list(self._lengths.values()))) if self._lengths else 0.0
        return np.array([self._lengths.get(ids.tobytes(), mean) for ids in prompts], np.float64)

    async def fit(self, pairs: Sequence[LengthPair]) -> float:
        await asyncio.sleep(self._fit_s)
        self._lengths |= {pair.prompt_ids.tobytes(): pair.response_tokens for pair in pairs}
        return 0.0

    async def keep(self, refreshes: int) -> None:
        """Nothing is saved: the lengths are lost when the process ends."""

    async def close(self) -> None:
        """There is nothing to release."""
