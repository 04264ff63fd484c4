"""Lengths by a model: what the ranker has said of a prompt (StreamRL 1.5).

    batch issued ──ScorePrompts──▶ ranker (its own process) ──LengthScores──▶ ``learn``

The scheduler asks when a batch is issued, one step ahead of its use, and goes on; a score that comes late, or never, is
one that nobody has. A later score of a prompt replaces the earlier one: the ranker has been refreshed since.
"""

from __future__ import annotations

import numpy as np

from actors.policies.length_predictor import PromptsView


class LearnedLengths:
    """It keeps the newest ``prompts_max`` scores."""

    probes = 0

    def __init__(self, prompts_max: int) -> None:
        self._prompts_max = prompts_max
        self._scores: dict[int, float] = {}

    def learn(self, keys: np.ndarray, scores: np.ndarray) -> None:
        """``scores``: float[p], the ranker's expected tokens of prompts ``keys``, uint64[p]."""
        for key, score in zip(keys.tolist(), scores.tolist(), strict=True):
            self._scores.pop(key, None)
            self._scores[key] = score
            if len(self._scores) > self._prompts_max:
                del self._scores[next(iter(self._scores))]

    def expected(self, view: PromptsView) -> np.ndarray:
        nothing = float("nan")
        return np.array([self._scores.get(key, nothing) for key in view.keys.tolist()], np.float64)

    def observe(self, view: PromptsView) -> None:
        """The ranker learns from what is observed; here only its scores count."""
