"""From rewards to advantages: pure functions of one group's rewards.

Always true
- ``float64[g]`` in, ``float64[g]`` out, for any g ≥ 1: siblings that were dropped are simply not there.
- A group whose rewards are all equal (so also a group of one) teaches nothing: exactly 0 for each, whatever
  the rounding of a mean would say.
"""

from __future__ import annotations

import numpy as np

from actors.trainer.errors import BadGrant

STD_EPSILON = 1e-6
"""Keeps the division finite; far below any spread of rewards that means something."""


def is_degenerate(rewards: np.ndarray) -> bool:
    """Whether all rewards (float64[g]) are equal, so that no relative advantage exists."""
    return bool(rewards.size < 2 or rewards.max() == rewards.min())


def scores(rewards: np.ndarray) -> np.ndarray:
    """The rewards as they are, of rules that compare no siblings (PPO, REINFORCE++)."""
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
