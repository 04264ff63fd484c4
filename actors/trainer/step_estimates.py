"""What a rule that whitens needs of a whole step before it can be trained: each token's advantage and return.

    samples, with scores; with old and reference log-probabilities where the KL is in the rewards
      ─ with a critic: portions ─▶ backend.values, under the weights before the step ─┐
      ─ without: zeros ───────────────────────────────────────────────────────────────┤
    ─▶ kl_shaped ─▶ generalised ─▶ whitened over the step ─▶ samples with advantage, for a critic old_values and returns

REINFORCE++ is PPO whose critic expects nothing and whose lambda is 1: an advantage is the discounted sum of the rewards
to come. Source: Hu et al. 2025 (REINFORCE++), sections 3.1 to 3.3; of PPO: ``gae.py``.

Invariants
- What comes out depends on the samples and the weights alone, not on the order in which they came; but for the last
  bits of reference log-probabilities that were computed early (``trainer.score_early``, in async).
- The KL is of the policy that is trained, as the trainer computes it: an engine's last bits are in no reward.
- Tokens of an environment take no part: the token after them follows on the model's token before them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from actors.trainer.backend import TrainBackend
from actors.trainer.batching import TrainSample, pad, portions
from actors.trainer.gae import explained_variance, generalised, kl_shaped, whitened
from configs.schema import JobConfig


class StepEstimates:
    """Estimates the advantages of one job's tokens. ``backend`` has its critic, if there is one."""

    def __init__(self, job: JobConfig, backend: TrainBackend) -> None:
        self._algorithm = job.algorithm
        self._backend = backend
        self._budget_tokens = job.trainer.pass_tokens
        self._metrics: dict[str, float] = {}

    async def estimated(self, samples: Sequence[TrainSample]) -> list[TrainSample]:
        """All of a step's samples, those without a token of the model left out; ``advantage`` is each one's score."""
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
        """float64[n, t]: what the critic expects before each token of the model; zeros without a critic."""
        values = np.zeros(where.shape)
        if not self._algorithm.has_critic:
            return values
        rows = {sample.name: row for row, sample in enumerate(answered)}
        for part in portions(answered, budget_tokens=self._budget_tokens):
            found = await self._backend.values(pad(part))
            for sample, line in zip(part, found, strict=True):
                response = _of_model(sample, line[sample.prompt_ids.size : sample.length])
                values[rows[sample.name], : response.size] = response
        return values

    def taken_metrics(self) -> dict[str, float]:
        """Columns of the step that was estimated since this was asked last; nothing if none was."""
        metrics, self._metrics = self._metrics, {}
        return metrics


def _of_model(sample: TrainSample, column: np.ndarray) -> np.ndarray:
    """Entries that belong to tokens of the model, in a column of the response's tokens."""
    return column if sample.mask is None else column[sample.mask]


def _spread(sample: TrainSample, row: np.ndarray) -> np.ndarray:
    """float32[r]: the front of ``row``, an entry a token of the model, where these stand in the response; else 0."""
    found = row[: sample.model_tokens].astype(np.float32)
    if sample.mask is None:
        return found
    spread = np.zeros(sample.tokens.size, np.float32)
    spread[sample.mask] = found
    return spread


def _table(
    answered: Sequence[TrainSample], where: np.ndarray, column: Callable[[TrainSample], np.ndarray | None]
) -> np.ndarray:
    """float64[n, t] of a column that every sample has, an entry a token of the model."""
    table = np.zeros(where.shape)
    for row, sample in enumerate(answered):
        known = column(sample)
        assert known is not None  # the trainer has scored all of them
        table[row, : sample.model_tokens] = _of_model(sample, known)
    return table


def shaped_columns(rewards: np.ndarray, ratios: np.ndarray | None, tokens: int) -> dict[str, float]:
    """Columns of a step's row, of ``tokens`` tokens."""
    count = len(rewards)
    kl = 0.0 if ratios is None else float(ratios.sum())
    return {
        "shaped_reward_mean": float(rewards.sum()) / count if count else math.nan,
        "kl_per_token": kl / max(1, tokens),
        "kl_per_response": kl / max(1, count),
    }
