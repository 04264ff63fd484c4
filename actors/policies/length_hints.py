"""Lengths of prompts that nobody has answered yet: what the data set says of them, or else how long they are.

    hint: tokens of the reference answer, else of the prompt        expected = mean + slope · (hint − mean hint)

A hint is no length: mean and slope are fitted to the prompts that have been answered so far. Before the first answer
the hints stand for themselves, which gives their order. A slope is never negative: hints that say nothing of lengths
come to the mean, and with equal expectations all parts of a plan are equal.

Invariant: a fold over what it was told, as every predictor; equal news give equal answers.
"""

from __future__ import annotations

import numpy as np


class LengthHints:
    """It fits response lengths to hints. Sums are all that it keeps."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)
        """Sums of 1, hint, length, hint² and hint · length over all answers."""

    def expected(self, hints: np.ndarray) -> np.ndarray:
        """float64[p] tokens of a response to prompts with these hints."""
        count, hint, length, squares, products = self._sums.tolist()
        if not count:
            return hints.astype(np.float64)
        spread = squares - hint * hint / count
        slope = max(0.0, (products - hint * length / count) / spread) if spread > 0 else 0.0
        return np.maximum(1.0, length / count + slope * (hints - hint / count))

    def observe(self, hints: np.ndarray, lengths: np.ndarray) -> None:
        """Responses to prompts with these hints were so long, float64[p]; NaN: none has come to an end."""
        known = np.isfinite(lengths)
        h, n = hints[known].astype(np.float64), lengths[known]
        self._sums += [len(h), h.sum(), n.sum(), (h * h).sum(), (h * n).sum()]
