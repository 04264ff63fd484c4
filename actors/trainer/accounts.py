"""Totals of one step: the metrics of ``CommitStep``, and exactly which samples the step consumed."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from actors.protocol.groups import GroupGrant
from actors.trainer.backend import MicroBatchStats, StepResult
from actors.trainer.learning.rules import StepShape, is_degenerate
from actors.trainer.learning.samples import model_tokens


class StepAccounts:
    """Adds up the micro-batches and groups of one step."""

    def __init__(self, *, has_reference: bool = False) -> None:
        self._has_reference = has_reference
        self.micro_batches = 0
        self.tokens = 0
        self._loss_sum = 0.0
        """Sum of losses in the current update."""
        self._update_tokens = 0
        self._losses: list[float] = []
        """Mean losses of the updates in the first pass that had something to learn from."""
        self.clipped = self.cut = self.kl = self.entropy = self.mismatch = self.older_mismatch = 0.0
        self.imbalance = 0.0
        self.older_tokens = 0
        self.passed_tokens = 0
        """Tokens of all passes over the step, by which the clipped and cut fractions are divided."""
        self.value_loss = self.value_clipped = self.passed_weight = 0.0
        self.waited_s = 0.0
        self.published_s = 0.0

    def add(self, stats: MicroBatchStats, *, micro_batches: int, again: bool = False) -> None:
        """Count the micro-batches of one update; ``again``: in a pass after the first."""
        self.micro_batches += micro_batches
        self.passed_tokens += stats.tokens
        self.passed_weight += stats.weight
        self.clipped += stats.clipped_sum
        self.cut += stats.cut_sum
        self.value_loss += stats.value_loss_sum
        self.value_clipped += stats.value_clipped_sum
        if again:
            return
        self.tokens += stats.tokens
        self._loss_sum += stats.loss_sum
        self._update_tokens += stats.tokens
        self.kl += stats.kl_sum
        self.entropy += stats.entropy_sum
        self.mismatch += stats.mismatch_sum - stats.older_mismatch_sum
        self.older_mismatch += stats.older_mismatch_sum
        self.older_tokens += stats.older_tokens
        self.imbalance += stats.imbalance_sum

    def updated(self, weight: float) -> None:
        """Note that the optimizer has stepped, after its sums were divided by ``weight``."""
        if self._update_tokens:
            self._losses.append(self._loss_sum / weight)
        self._loss_sum, self._update_tokens = 0.0, 0

    def metrics(
        self, groups: Iterable[GroupGrant], result: StepResult, *, step: int, seconds: float
    ) -> dict[str, float]:
        """The step's row of metrics. Per-token means are over computed tokens, response lengths and rewards over all
        samples; a mean of nothing is NaN.
        """
        granted = list(groups)
        lengths = np.concatenate([model_tokens(g) for g in granted]) if granted else np.zeros(0, np.int64)
        rewards = np.concatenate([g.rewards for g in granted]) if granted else np.zeros(0)
        oldest = [int(g.versions[g.versions >= 0].min(initial=step)) for g in granted]
        return {
            "seconds": seconds,
            "loss": _mean(sum(self._losses), len(self._losses)),
            "grad_norm": result.grad_norm if self.micro_batches else math.nan,
            "learning_rate": result.learning_rate,
            "update_skipped": float(result.skipped),
            "clip_fraction": _mean(self.clipped, self.passed_tokens),
            "correction_cut_fraction": _mean(self.cut, self.passed_tokens),
            "kl": _mean(self.kl, self.tokens) if self._has_reference else math.nan,
            "entropy": _mean(self.entropy, self.tokens),
            "engine_mismatch": _mean(self.mismatch, self.tokens - self.older_tokens),
            "stale_mismatch": _mean(self.older_mismatch, self.older_tokens),
            **({"expert_imbalance": self.imbalance / self.tokens} if self.imbalance and self.tokens else {}),
            "tokens_trained": float(self.tokens),
            "micro_batches": float(self.micro_batches),
            "trainer_idle_fraction": min(1.0, self.waited_s / seconds) if seconds > 0 else 0.0,
            "publish_seconds": self.published_s,
            "staleness_max": float(max(0, step - min(oldest))) if oldest else math.nan,
            "response_tokens_mean": float(lengths.mean()) if granted else math.nan,
            "response_tokens_max": float(lengths.max()) if granted else math.nan,
            "reward_mean": float(rewards.mean()) if granted else math.nan,
            "reward_std": float(rewards.std()) if granted else math.nan,
            "degenerate_fraction": sum(is_degenerate(g.rewards) for g in granted) / len(granted)
            if granted
            else math.nan,
        }

    def critic_metrics(self, result: StepResult, *, alone: bool = False) -> dict[str, float]:
        """Further columns of a step with a critic; ``alone``: it is trained alone, so the policy has no gradient."""
        norm = result.critic_grad_norm
        return {
            "value_loss": _mean(self.value_loss, self.passed_weight),
            "value_clip_fraction": _mean(self.value_clipped, self.passed_tokens),
            "critic_grad_norm": math.nan if norm is None or not self.micro_batches else norm,
            **({"grad_norm": math.nan} if alone else {}),
        }


def _mean(total: float, count: float) -> float:
    """A mean of nothing is NaN, which becomes null in the files: a 0 would look like a measurement."""
    return total / count if count else math.nan


def shape_of(groups: Iterable[GroupGrant], max_response_tokens: int) -> StepShape:
    """The size of one update, groups that teach nothing included."""
    granted = list(groups)
    return StepShape(
        samples=sum(group.siblings.size for group in granted),
        response_tokens=int(sum(model_tokens(group).sum() for group in granted)),
        max_response_tokens=max_response_tokens,
    )


def consumed(groups: Iterable[GroupGrant]) -> tuple[np.ndarray, np.ndarray]:
    """(prompts int64[n], siblings int32[n]) of every sample of the step, by prompt, then as granted."""
    ordered = sorted(groups, key=lambda group: group.prompt)
    prompts = [np.full(group.siblings.size, group.prompt, dtype=np.int64) for group in ordered]
    siblings = [group.siblings.astype(np.int32) for group in ordered]
    if not ordered:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
    return np.concatenate(prompts), np.concatenate(siblings)
