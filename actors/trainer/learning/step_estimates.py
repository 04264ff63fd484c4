"""Estimates that a whitening rule needs for a whole step before training: each token's advantage and return.

    samples, with scores; with old and reference log-probabilities where the KL is in the rewards
      ─ with a critic: portions ─▶ values, under the weights before the step ─────────┐
      ─ without: zeros ───────────────────────────────────────────────────────────────┤
    ─▶ kl_shaped ─▶ generalised ─▶ whitened over the step ─▶ samples with advantage, for a critic old_values and returns

REINFORCE++ is PPO with a critic of zeros and a lambda of 1: an advantage is the discounted sum of the rewards to come.
Source: Hu et al. 2025 (REINFORCE++), sections 3.1 to 3.3; of PPO: at ``generalised``.

Invariants
- Estimates depend on the samples and the weights alone, not on the order in which they came; except for the last
  bits of reference log-probabilities that were computed early (``trainer.score_early``, in async).
- The KL is computed from the trainer's own log-probabilities: an engine's last bits are in no reward.
- Tokens of an environment take no part: the token after them follows on the model's token before them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import numpy as np

from actors.protocol.training import MicroBatch
from actors.trainer.learning.samples import TrainSample, pad, portions
from configs.schema import JobConfig


class StepEstimates:
    """Estimates the advantages of one job's tokens. ``values``: asks the job's critic, if there is one."""

    def __init__(self, job: JobConfig, values: Callable[[MicroBatch], Awaitable[np.ndarray]]) -> None:
        self._algorithm = job.algorithm
        self._expected = values
        self.budget_tokens = job.trainer.pass_tokens
        """Padded tokens of a micro-batch."""
        self._metrics: dict[str, float] = {}

    async def estimated(self, samples: Sequence[TrainSample]) -> list[TrainSample]:
        """Estimates for a step's samples, whose ``advantage`` is a score; drops those without a token of the model."""
        algorithm = self._algorithm
        answered = [sample for sample in samples if sample.model_tokens]
        lengths = np.array([sample.model_tokens for sample in answered], np.int64)
        where = np.arange(int(lengths.max(initial=0))) < lengths[:, None]
        values = await self._values(answered, where)
        with_kl = algorithm.kl_in_rewards and algorithm.kl_coefficient > 0
        ratios = None
        if with_kl:
            policy = _table(answered, where, lambda s: s.old_logprobs)
            ratios = policy - _table(answered, where, lambda s: s.reference_logprobs)
        given = np.array([float(sample.advantage) for sample in answered])
        rewards = kl_shaped(given, lengths, ratios, algorithm.kl_coefficient)
        trust = algorithm.gae_lambda if algorithm.has_critic else 1.0
        advantages = generalised(rewards, values, gamma=algorithm.gamma, gae_lambda=trust)
        returns = advantages + values
        self._metrics = shaped_columns(rewards, ratios, int(lengths.sum()))
        if algorithm.has_critic:
            self._metrics["explained_variance"] = explained_variance(returns[where], values[where])
        white = whitened(advantages, where)
        estimated: list[TrainSample] = []
        for row, sample in enumerate(answered):
            found = dataclasses.replace(sample, advantage=_spread(sample, white[row]))
            if algorithm.has_critic:
                old, new = _spread(sample, values[row]), _spread(sample, returns[row])
                found = dataclasses.replace(found, old_values=old, returns=new)
            estimated.append(found)
        return estimated

    async def _values(self, answered: Sequence[TrainSample], where: np.ndarray) -> np.ndarray:
        """Values float64[n, t] of the critic before each token of the model; zeros without a critic."""
        values = np.zeros(where.shape)
        if not self._algorithm.has_critic:
            return values
        rows = {sample.name: row for row, sample in enumerate(answered)}
        for part in portions(answered, budget_tokens=self.budget_tokens):
            found = await self._expected(pad(part))
            for sample, line in zip(part, found, strict=True):
                response = _of_model(sample, line[sample.prompt_ids.size : sample.length])
                values[rows[sample.name], : response.size] = response
        return values

    def taken_metrics(self) -> dict[str, float]:
        """Columns of the step that was estimated since the last call of this; empty if none was."""
        metrics, self._metrics = self._metrics, {}
        return metrics


def _of_model(sample: TrainSample, column: np.ndarray) -> np.ndarray:
    """Entries that belong to tokens of the model, in a column of the response's tokens."""
    return column if sample.mask is None else column[sample.mask]


def _spread(sample: TrainSample, row: np.ndarray) -> np.ndarray:
    """float32[r]: the first entries of ``row`` at the places of the model's tokens in the response; else 0."""
    found = row[: sample.model_tokens].astype(np.float32)
    if sample.mask is None:
        return found
    spread = np.zeros(sample.tokens.size, np.float32)
    spread[sample.mask] = found
    return spread


def _table(
    answered: Sequence[TrainSample], where: np.ndarray, column: Callable[[TrainSample], np.ndarray | None]
) -> np.ndarray:
    """float64[n, t] of a column that every sample has, with an entry for each token of the model."""
    table = np.zeros(where.shape)
    for row, sample in enumerate(answered):
        known = column(sample)
        assert known is not None  # the trainer has scored all of them
        table[row, : sample.model_tokens] = _of_model(sample, known)
    return table


def shaped_columns(rewards: np.ndarray, ratios: np.ndarray | None, tokens: int) -> dict[str, float]:
    """Columns of the row of a step with ``tokens`` tokens."""
    count = len(rewards)
    kl = math.nan if ratios is None else float(ratios.sum())
    return {
        "shaped_reward_mean": float(rewards.sum()) / count if count else math.nan,
        "kl_per_token": kl / tokens if tokens else math.nan,
        "kl_per_response": kl / count if count else math.nan,
    }


# ------------------------------------------------------------ pure functions over a whole step
#
# All arrays are float64[n, t], a row for each response, with zeros after its end. ``values[:, i]`` is the critic's
# value before token i is drawn. The value after the last token is 0, also where the response was cut off.

WHITEN_EPSILON: Final = 1e-8
"""Addend that keeps the division finite where all advantages are equal, as in TRL."""


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
    """Advantages at ``where`` bool[n, t], scaled to mean 0 and (sample) variance 1; zeros elsewhere.

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
