"""A length model without arithmetic: it remembers each prompt's newest length, in the time that a cost model says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from actors.ranker.model import LengthPair


class SimulatedLengthModel:
    """Implements ``LengthModel``; a prompt that it has not seen is of mean length."""

    def __init__(self, *, score_s: float = 0.05, fit_s: float = 0.5) -> None:
        self._score_s, self._fit_s = score_s, fit_s
        self._lengths: dict[bytes, float] = {}

    async def start(self) -> int:
        """Nothing to make, and nothing kept."""
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
        """Its memory goes with it."""

    async def close(self) -> None:
        """Nothing to give back."""
