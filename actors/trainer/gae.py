"""From scores and values to the advantages and returns of tokens: pure functions over a whole step.

    score of a response ─ kl_shaped ─▶ rewards ─ generalised ─▶ advantages ─┬─ whitened ─▶ what the policy learns from
    values ────────────────────────────────────────┘                        └─ + values ─▶ returns, for the critic

All arrays are float64[n, t], a row a response, with zeros behind its end. ``values[:, i]`` is what the critic expects
before token i is drawn. A response ends with its last token, also one that was cut off there: nothing is expected of
what would have come.
"""

from __future__ import annotations

from typing import Final

import numpy as np

WHITEN_EPSILON: Final = 1e-8
"""Keeps the division finite where all advantages are equal, as in TRL."""


def kl_shaped(scores: np.ndarray, lengths: np.ndarray, log_ratios: np.ndarray | None, coefficient: float) -> np.ndarray:
    """Rewards: minus ``coefficient`` times log(policy / reference) at each token, and the score at the last one.

    ``scores`` float64[n]; ``lengths`` int[n], at least 1; ``log_ratios`` float64[n, t], None: there is no reference.
    Source: Ziegler et al. 2019 (Fine-tuning language models from human preferences), equation 2, with the score where
    InstructGPT (Ouyang et al. 2022, section 3.5) and TRL's ``PPOTrainer`` have it.
    """
    rewards = np.zeros((len(scores), int(lengths.max(initial=0))))
    if log_ratios is not None:
        rewards -= coefficient * log_ratios
    rewards[np.arange(len(scores)), lengths - 1] += scores
    return rewards


def generalised(rewards: np.ndarray, values: np.ndarray, *, gamma: float, gae_lambda: float) -> np.ndarray:
    """Advantages: the sum over l of (gamma lambda)^l delta(t + l), delta(t) = r(t) + gamma V(t + 1) - V(t).

    Source: Schulman et al. 2016 (High-dimensional continuous control using generalized advantage estimation),
    equation 16; in the form of Schulman et al. 2017 (PPO), equations 11 and 12.
    """
    following = np.concatenate([values[:, 1:], np.zeros((len(values), 1))], axis=1)
    deltas = rewards + gamma * following - values
    advantages = np.empty_like(deltas)
    ahead = np.zeros(len(deltas))
    for t in reversed(range(deltas.shape[1])):
        ahead = deltas[:, t] + gamma * gae_lambda * ahead
        advantages[:, t] = ahead
    return advantages


def whitened(advantages: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Those at ``where`` bool[n, t] with mean 0 and (sample) variance 1; zeros elsewhere.

    Source: ``masked_whiten`` of TRL's ``PPOTrainer``, after Ziegler's ``whiten``.
    """
    result = np.zeros_like(advantages)
    tokens = advantages[where]
    if tokens.size > 1:
        result[where] = (tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + WHITEN_EPSILON)
    return result


def explained_variance(returns: np.ndarray, values: np.ndarray) -> float:
    """1 - Var(returns - values) / Var(returns) over tokens (float64[k]): 1 is a perfect critic, 0 a constant one.

    NaN where returns do not vary.
    """
    spread = float(returns.var()) if returns.size else 0.0
    return 1.0 - float((returns - values).var()) / spread if spread > 0 else float("nan")
