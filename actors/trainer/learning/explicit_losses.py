"""Losses that a caller names and feeds with numbers of its own: sums over tokens, which nothing divides or masks.

    q    log-probability by the policy that generated the token: column ``engine``
    p    by the trainer, with gradient: column ``new``
    A    advantage

    cross_entropy         -log p
    importance_sampling   -(p / q) A
    ppo                   -min(r A, clip(r, low, high) A)              r = p / q of the token
    cispo                 -clip(r, low, high) A log p                  the clipped ratio without gradient
    dro                   -(A log p - beta / 2 (log p - log q)^2)
    gspo                  as ppo, with r of the sequence               its value; the gradient is that of the token

Each gives one loss for each token, and the backend weighs and sums them (``MicroBatch.loss_weight``). Bounds are ratios
themselves, not distances from 1. ``actors/protocol/datums.py`` says which numbers and parameters each one takes.

Where the advantage is 0 the ratio is taken as 1: prompts have any filler in place of a log-probability.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from actors.protocol.training import LossSpec
from actors.trainer.learning.losses import PolicyLoss, TokenColumns, over_sequences


def _log_ratio(columns: TokenColumns) -> Tensor:
    """log p - log q, 0 where the advantage is 0."""
    return torch.where(columns.advantages != 0, columns.new - columns.engine, 0.0)


def _bounded(ratio: Tensor, spec: LossSpec) -> Tensor:
    return ratio.clamp(spec.parameters["clip_low_threshold"], spec.parameters["clip_high_threshold"])


def cross_entropy(columns: TokenColumns, spec: LossSpec) -> Tensor:
    """-log p. With the caller's weights it is any function that is linear in the log-probabilities."""
    return -columns.new


def importance_sampling(columns: TokenColumns, spec: LossSpec) -> Tensor:
    """-(p / q) A. Source: the policy gradient of samples of another policy, as in Degris et al. 2012 (Off-policy
    actor-critic), section 2.
    """
    return -torch.exp(_log_ratio(columns)) * columns.advantages


def ppo(columns: TokenColumns, spec: LossSpec) -> Tensor:
    """The clipped surrogate of each token. Source: Schulman et al. 2017 (PPO), equation 7."""
    return _clipped(torch.exp(_log_ratio(columns)), columns.advantages, spec)


def _clipped(ratio: Tensor, advantages: Tensor, spec: LossSpec) -> Tensor:
    return -torch.minimum(ratio * advantages, _bounded(ratio, spec) * advantages)


def cispo(columns: TokenColumns, spec: LossSpec) -> Tensor:
    """A bounded importance weight times the policy gradient. Source: MiniMax 2025 (MiniMax-M1, CISPO), equation 4."""
    weight = _bounded(torch.exp(_log_ratio(columns).detach()), spec)
    return -weight * columns.advantages * columns.new


def dro(columns: TokenColumns, spec: LossSpec) -> Tensor:
    """The policy gradient with a quadratic penalty of the distance from q, also where the advantage is 0.

    Source: Richemond et al. 2024 (Offline regularised reinforcement learning, DRO), with the caller's advantages.
    """
    apart = columns.new - columns.engine
    return -(columns.new * columns.advantages - 0.5 * spec.parameters["beta"] * apart.square())


def gspo(columns: TokenColumns, spec: LossSpec) -> Tensor:
    """As ppo, with the geometric mean of the ratios of the sequence's tokens that ``ratio_mask`` marks.

    Source: Zheng et al. 2025 (Group sequence policy optimization), section 4.3, GSPO-token, equations 13 and 14.
    """
    new = columns.new.detach()
    marked = torch.ones_like(new, dtype=torch.bool) if columns.ratio_mask is None else columns.ratio_mask != 0
    apart = torch.where(marked, new - columns.engine, 0.0)
    count = over_sequences(marked.to(apart.dtype), columns.where, mean=False).clamp(min=1.0)
    ratio = torch.exp(over_sequences(apart, columns.where, mean=False) / count + (columns.new - new))
    return _clipped(ratio, columns.advantages, spec)


EXPLICIT_LOSSES: Final[dict[str, PolicyLoss]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}
