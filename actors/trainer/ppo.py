"""What PPO needs of a whole step before it can be trained: each token's advantage and return.

    samples ─ portions ─▶ backend.values           under the weights before the step
                        └▶ backend.score           the policy's, if the KL or a second pass needs them
            ─▶ kl_shaped ─▶ generalised ─▶ whitened over the step ─▶ samples with advantage, old_values, returns

Invariants
- What comes out depends on the samples and the weights alone, not on the order in which they came; but for the last
  bits of reference log-probabilities that were computed early (``trainer.score_early``, in async).
- The KL is of the policy that is trained, as the trainer computes it: an engine's last bits are in no reward. Where an
  engine's log-probabilities differ from the trainer's by numerics alone, these take their place, so that a second pass,
  in which each token is weighted by its ratio, is the same bit for bit whoever has generated what.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from actors.trainer.backend import NUMERICS, TrainBackend
from actors.trainer.batching import TrainSample, pad, portions
from actors.trainer.gae import explained_variance, generalised, kl_shaped, whitened
from configs.schema import JobConfig


class PpoEstimates:
    """Estimates the advantages of one job, whose ``backend`` has policy and critic."""

    def __init__(self, job: JobConfig, backend: TrainBackend) -> None:
        self._algorithm = job.algorithm
        self._backend = backend
        self._budget_tokens = job.trainer.micro_batch_tokens
        self._temperature = job.rollout.temperature
        self._metrics: dict[str, float] = {}

    async def estimated(self, samples: Sequence[TrainSample]) -> list[TrainSample]:
        """All of a step's samples, those without a response left out; ``advantage`` is each one's score."""
        answered = [sample for sample in samples if sample.tokens.size]
        lengths = np.array([sample.tokens.size for sample in answered], np.int64)
        shape = len(answered), int(lengths.max(initial=0))
        where = np.arange(shape[1]) < lengths[:, None]
        rows = {(sample.prompt, sample.sibling): row for row, sample in enumerate(answered)}
        values, policy, reference = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        with_kl = self._algorithm.kl_coefficient > 0
        with_policy = with_kl or self._algorithm.epochs > 1
        for part in portions(answered, budget_tokens=self._budget_tokens):
            at = np.array([rows[sample.prompt, sample.sibling] for sample in part])
            batch = pad(part)
            _put(values, at, part, await self._backend.values(batch))
            if with_policy:
                _put(policy, at, part, await self._backend.score(batch, temperature=self._temperature, reference=False))
            if batch.reference_logprobs is not None:
                _put(reference, at, part, batch.reference_logprobs)
        ratios = policy - reference if with_kl else None
        scores = np.array([float(sample.advantage) for sample in answered])
        rewards = kl_shaped(scores, lengths, ratios, self._algorithm.kl_coefficient)
        advantages = generalised(rewards, values, gamma=self._algorithm.gamma, gae_lambda=self._algorithm.gae_lambda)
        returns = advantages + values
        self._metrics = columns(rewards, ratios, explained_variance(returns[where], values[where]), int(lengths.sum()))
        found = [column.astype(np.float32) for column in (whitened(advantages, where), values, returns, policy)]
        return [
            _with(sample, *(column[row, : sample.tokens.size] for column in found), settle=with_policy)
            for row, sample in enumerate(answered)
        ]

    def taken_metrics(self) -> dict[str, float]:
        """Columns of the step that was estimated since this was asked last; nothing if none was."""
        metrics, self._metrics = self._metrics, {}
        return metrics


def _put(column: np.ndarray, at: np.ndarray, part: Sequence[TrainSample], found: np.ndarray) -> None:
    """Move what was computed of ``part``, float32[B, T] with prompts, to its rows of ``column``, without prompts."""
    for row, sample, line in zip(at.tolist(), part, found, strict=True):
        column[row, : sample.tokens.size] = line[sample.prompt_ids.size : sample.length]


def _with(
    sample: TrainSample,
    advantage: np.ndarray,
    values: np.ndarray,
    returns: np.ndarray,
    policy: np.ndarray,
    *,
    settle: bool,
) -> TrainSample:
    logprobs = sample.logprobs
    if settle:
        same = ~sample.stale & (np.abs(policy - logprobs) <= NUMERICS)
        logprobs = np.where(same, policy, logprobs)
    return dataclasses.replace(sample, advantage=advantage, old_values=values, returns=returns, logprobs=logprobs)


def columns(rewards: np.ndarray, ratios: np.ndarray | None, explained: float, tokens: int) -> dict[str, float]:
    """Columns of a step's row, of ``tokens`` tokens."""
    count = len(rewards)
    kl = None if ratios is None else float(ratios.sum())
    return {
        "explained_variance": explained,
        "shaped_reward_mean": float(rewards.sum()) / count if count else math.nan,
        "kl_per_token": 0.0 if kl is None else kl / max(1, tokens),
        "kl_per_response": 0.0 if kl is None else kl / max(1, count),
    }
