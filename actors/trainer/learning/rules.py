"""The learning rules by name: how rewards become advantages, and what an update's summed loss is divided by.

    rewards float64[g], lengths int64[g] ─ overlong penalty ─▶ rewards ─ advantages ─▶ float64[g]       one group
    StepShape ─ normaliser ─▶ float                                                                     one update

Advantages are ``float64[g]`` for any g ≥ 1: siblings that were dropped are simply not there. Where siblings are
compared, a group whose rewards are all equal (so also a group of one) gets exactly 0, however a mean is rounded.

The surrogates that are maximised are in ``losses.py`` (``AlgorithmConfig.surrogate``), whitening over a whole step in
``step_estimates.py``. Lengths and tokens are those of the model: tokens of an environment in a response do not count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from actors.trainer.errors import BadGrant
from actors.trainer.learning.own_functions import GroupAdvantages, own_advantages
from configs.learning_schema import AlgorithmConfig, LossMean

STD_EPSILON = 1e-6
"""Addend that keeps the division finite; far below any spread of rewards that means something."""


def is_degenerate(rewards: np.ndarray) -> bool:
    """Whether all rewards (float64[g]) are equal, so that no relative advantage exists."""
    return bool(rewards.size < 2 or rewards.max() == rewards.min())


def scores(rewards: np.ndarray) -> np.ndarray:
    """The rewards as they are, for rules that compare no siblings (PPO, REINFORCE++)."""
    return _checked(rewards)


def group_normalised(rewards: np.ndarray) -> np.ndarray:
    """(r - mean) / (std + epsilon) with the sample standard deviation (g - 1).

    Source: GRPO, Shao et al. 2024 (DeepSeekMath), equation 3 and section 4.1.2, outcome supervision.
    """
    checked = _checked(rewards)
    if is_degenerate(checked):
        return np.zeros_like(checked)
    return (checked - checked.mean()) / (checked.std(ddof=1) + STD_EPSILON)


def centred(rewards: np.ndarray) -> np.ndarray:
    """The reward minus the mean, without the division that favours groups of small spread.

    Source: Dr. GRPO, Liu et al. 2025 (Understanding R1-Zero-like training), section 3.2; REINFORCE++-baseline, Hu et
    al. 2025 (REINFORCE++), which whitens the result over the step.
    """
    checked = _checked(rewards)
    return np.zeros_like(checked) if is_degenerate(checked) else checked - checked.mean()


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """Each reward minus the mean of the *other* rewards, an unbiased baseline: g / (g - 1) times the centred reward.

    Source: RLOO, Ahmadian et al. 2024 (Back to basics), section 3.1.
    """
    checked = _checked(rewards)
    if is_degenerate(checked):
        return np.zeros_like(checked)
    return checked - (checked.sum() - checked) / (checked.size - 1)


def overlong_penalties(lengths: np.ndarray, *, limit: int, buffer: int) -> np.ndarray:
    """float64[g]: min(0, -(length - (limit - buffer)) / buffer), which is -1 at the limit. ``lengths`` int[g].

    Source: soft overlong punishment of DAPO, Yu et al. 2025, equation 13.
    """
    return np.minimum(0.0, (limit - buffer - lengths.astype(np.float64)) / buffer)


def _checked(rewards: np.ndarray) -> np.ndarray:
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise BadGrant(f"rewards: shape {values.shape}, expected one value per sibling")
    if not np.isfinite(values).all():
        raise BadGrant(f"rewards: {values.tolist()}, expected finite numbers; a scorer without result is no reward")
    return values


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
"""Functions by rule, from a group's rewards float64[g] to advantages, or to scores if the rule whitens.

Sources: GSPO, Zheng et al. 2025, equation 6; DAPO, Yu et al. 2025, equation 9; CISPO, MiniMax 2025 (MiniMax-M1),
section 3.1: all three as GRPO. The others are named at the functions, and in ``step_estimates.py``.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """Counts all samples of an update, including those of degenerate groups, which are not computed."""

    samples: int
    response_tokens: int
    max_response_tokens: int
    """Limit of the job (``rollout.max_tokens``), not the longest response that occurred."""


def tokens_of_step(shape: StepShape) -> float:
    """The number of tokens: a token of a long response weighs as much as one of a short response.

    Source: the token-level loss of DAPO, Yu et al. 2025, section 3.3.
    """
    return float(max(1, shape.response_tokens))


def samples_of_step(shape: StepShape) -> float:
    """The number of sequences.

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
    """Holds a job's learning rule. ``max_tokens``: the limit of a response."""

    def __init__(self, algorithm: AlgorithmConfig, max_tokens: int) -> None:
        self._loss_mean: LossMean = algorithm.loss_mean
        self._overlong = algorithm.overlong
        self._max_tokens = max_tokens
        self._compare = ADVANTAGES[algorithm.name]
        self._own: GroupAdvantages | None = None if algorithm.advantage is None else own_advantages(algorithm.advantage)

    def advantages(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Advantages float64[g], one per response, or its score if the rule whitens over the whole step."""
        if self._overlong is not None:
            buffer = self._overlong.buffer_tokens
            rewards = rewards + overlong_penalties(lengths, limit=self._max_tokens, buffer=buffer)
        return self._compare(rewards) if self._own is None else self._own(rewards, lengths)

    def token_weight(self, tokens: int) -> float:
        """Weight of each token of a sequence of so many tokens; adds up to 1 where a sequence counts by its mean."""
        return 1.0 / max(1, tokens) if self._loss_mean == "sequence" else 1.0

    def normaliser(self, shape: StepShape) -> float:
        """The divisor of the summed, weighted token losses of one update; at least 1."""
        return NORMALISERS[self._loss_mean](shape)
