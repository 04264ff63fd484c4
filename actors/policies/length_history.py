"""Lengths by memory: a prompt will be answered about as long as in earlier epochs (StreamRL 1.5, cheap substitute a).

    ema ← ema + alpha · (mean length of its group − ema)        one number a prompt; alpha 1: the last epoch alone

Knows nothing in the first epoch. Later it follows the policy's drift with the lag of one epoch, which a drift that is
common to all prompts does not show, since only the order counts.
"""

from __future__ import annotations

import numpy as np

from actors.policies.length_predictor import PromptsView, mean_lengths

ALPHA = 0.5
"""Weight of the newest epoch, unless another one is given: a group's mean is itself a mean over siblings, and the
policy moves."""


class LengthHistory:
    """It knows ``prompts_max`` prompts; beyond that the one that was seen longest ago is forgotten."""

    probes = 0

    def __init__(self, prompts_max: int, *, alpha: float = ALPHA) -> None:
        self._prompts_max = prompts_max
        self._alpha = alpha
        self._ema: dict[int, float] = {}

    def expected(self, view: PromptsView) -> np.ndarray:
        nothing = float("nan")
        return np.array([self._ema.get(key, nothing) for key in view.keys.tolist()], np.float64)

    def observe(self, view: PromptsView) -> None:
        for key, length in zip(view.keys.tolist(), mean_lengths(view).tolist(), strict=True):
            if length == length:  # noqa: PLR0124  not NaN: some sibling has finished
                before = self._ema.pop(key, length)
                self._ema[key] = before + self._alpha * (length - before)
                if len(self._ema) > self._prompts_max:
                    del self._ema[next(iter(self._ema))]
