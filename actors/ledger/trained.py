"""Which step has trained each prompt: a prompt belongs to one step for ever."""

from __future__ import annotations

import numpy as np


class TrainedPrompts:
    """It maps a prompt's ordinal to its step, in a column that grows."""

    def __init__(self) -> None:
        self._step = np.full(1024, -1, np.int32)

    def mark(self, prompts: np.ndarray, step: int) -> int:
        """Note that ``step`` trained these, one entry a sample; returns how many another step had trained before."""
        if not len(prompts):
            return 0
        top = int(prompts.max()) + 1
        if top > len(self._step):
            grown = np.full(max(top, 2 * len(self._step)), -1, np.int32)
            grown[: len(self._step)] = self._step
            self._step = grown
        before = self._step[prompts]
        self._step[prompts] = step
        return int(np.count_nonzero((before >= 0) & (before != step)))
