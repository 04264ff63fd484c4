"""The learning rules by name: what a group's rewards become, and what a step's summed loss is divided by.

    rewards float64[g], lengths int64[g] ─ overlong penalty ─▶ rewards ─ advantages ─▶ float64[g]       one group
    StepShape ─ normaliser ─▶ float                                                                     one update

What is maximised is in ``losses.py`` (``AlgorithmConfig.surrogate``), what whitens a whole step in
``step_estimates.py``. Lengths and tokens are those of the model: what an environment said inside a response counts
nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from actors.trainer.advantages import centred, group_normalised, leave_one_out, overlong_penalties, scores
from actors.trainer.own_functions import GroupAdvantages, own_advantages
from configs.learning_schema import AlgorithmConfig, LossMean


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """Counts all samples of an update, those of degenerate groups included: they are not computed, but they count."""

    samples: int
    response_tokens: int
    max_response_tokens: int
    """The limit of the job (``rollout.max_tokens``), not the longest that occurred."""


ADVANTAGES: Final[dict[str, Callable[[np.ndarray], np.ndarray]]] = {
    "grpo": group_normalised,
    "dr_grpo": centred,
    "rloo": leave_one_out,
    "dapo": group_normalised,
    "gspo": group_normalised,
    "cispo": group_normalised,
    "reinforce_pp_baseline": centred,
    "reinforce_pp": scores,
    "ppo": scores,
}
"""Rule → rewards float64[g] of a group to advantages, or for a rule that whitens, to scores.

Sources: GSPO, Zheng et al. 2025, equation 6; DAPO, Yu et al. 2025, equation 9; CISPO, MiniMax 2025 (MiniMax-M1),
section 3.1: all three as GRPO. The others are named at the functions, and in ``step_estimates.py``.
"""


def tokens_of_step(shape: StepShape) -> float:
    """How many tokens there are: one of a long response weighs as much as one of a short response.

    Source: the token-level loss of DAPO, Yu et al. 2025, section 3.3.
    """
    return float(max(1, shape.response_tokens))


def samples_of_step(shape: StepShape) -> float:
    """How many sequences there are.

    Sources: RLOO, Ahmadian et al. 2024 (Back to basics), section 2.2, where a sequence is the sum of its tokens; GRPO,
    Shao et al. 2024, equation 3, and GSPO, Zheng et al. 2025, equation 5, where it is their mean.
    """
    return float(max(1, shape.samples))


def constant_length(shape: StepShape) -> float:
    """Samples times the response limit: the same for every step of a job that loses no sample.

    Source: Dr. GRPO, Liu et al. 2025 (Understanding R1-Zero-like training), section 3.2: a division by a response's own
    length favours long wrong answers.
    """
    return float(max(1, shape.samples * shape.max_response_tokens))


NORMALISERS: Final[dict[LossMean, Callable[[StepShape], float]]] = {
    "token": tokens_of_step,
    "sequence": samples_of_step,
    "sequence_sum": samples_of_step,
    "constant": constant_length,
}


class LearningRule:
    """Holds what a job learns by. ``max_tokens``: the limit of a response."""

    def __init__(self, algorithm: AlgorithmConfig, max_tokens: int) -> None:
        self._loss_mean: LossMean = algorithm.loss_mean
        self._overlong = algorithm.overlong
        self._max_tokens = max_tokens
        self._compare = ADVANTAGES[algorithm.name]
        self._own: GroupAdvantages | None = None if algorithm.advantage is None else own_advantages(algorithm.advantage)

    def advantages(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """float64[g], one for all tokens of a response, or its score where tokens get theirs from the whole step."""
        if self._overlong is not None:
            buffer = self._overlong.buffer_tokens
            rewards = rewards + overlong_penalties(lengths, limit=self._max_tokens, buffer=buffer)
        return self._compare(rewards) if self._own is None else self._own(rewards, lengths)

    def token_weight(self, tokens: int) -> float:
        """Weight of each token of a sequence of so many: they add up to 1 where a sequence counts by its mean."""
        return 1.0 / max(1, tokens) if self._loss_mean == "sequence" else 1.0

    def normaliser(self, shape: StepShape) -> float:
        """The divisor of the summed, weighted token losses of one update; at least 1."""
        return NORMALISERS[self._loss_mean](shape)
