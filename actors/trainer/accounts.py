"""What one step adds up to: the metrics of ``CommitStep``, and exactly which samples it consumed."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from actors.protocol.groups import GroupGrant
from actors.trainer.advantages import is_degenerate
from actors.trainer.backend import MicroBatchStats, StepResult
from actors.trainer.batching import model_tokens
from actors.trainer.rules import StepShape


class StepAccounts:
    """Adds up the micro-batches and groups of one step."""

    def __init__(self) -> None:
        self.micro_batches = 0
        self.tokens = 0
        self._loss_sum = 0.0
        """Sum in the update that is under way."""
        self._losses: list[float] = []
        """Mean losses of the updates in the first pass."""
        self.clipped = self.cut = self.kl = self.entropy = self.mismatch = 0.0
        self.passed_tokens = 0
        """Tokens of all passes over the step, to which alone what is clipped, and the critic's loss, belong."""
        self.value_loss = self.value_clipped = self.passed_weight = 0.0
        self.waited_s = 0.0
        self.published_s = 0.0

    def add(self, stats: MicroBatchStats, *, again: bool = False) -> None:
        """Count one micro-batch; ``again``: in a pass after the first."""
        self.micro_batches += 1
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
        self.kl += stats.kl_sum
        self.entropy += stats.entropy_sum
        self.mismatch += stats.mismatch_sum

    def updated(self, weight: float) -> None:
        """The optimizer has stepped on what was added; its sums were divided by ``weight``."""
        self._losses.append(self._loss_sum / weight)
        self._loss_sum = 0.0

    def metrics(
        self, groups: Iterable[GroupGrant], result: StepResult, *, step: int, seconds: float
    ) -> dict[str, float]:
        """The step's row. Per-token means are over computed tokens, response lengths and rewards over all samples;
        a mean of nothing is NaN.
        """
        granted = list(groups)
        lengths = np.concatenate([model_tokens(g) for g in granted]) if granted else np.zeros(0, np.int64)
        rewards = np.concatenate([g.rewards for g in granted]) if granted else np.zeros(0)
        oldest = min((int(g.versions[g.versions >= 0].min(initial=step)) for g in granted), default=step)
        tokens = max(1, self.tokens)
        return {
            "seconds": seconds,
            "loss": sum(self._losses) / max(1, len(self._losses)),
            "grad_norm": result.grad_norm,
            "learning_rate": result.learning_rate,
            "update_skipped": float(result.skipped),
            "clip_fraction": self.clipped / max(1, self.passed_tokens),
            "correction_cut_fraction": self.cut / max(1, self.passed_tokens),
            "kl": self.kl / tokens,
            "entropy": self.entropy / tokens,
            "engine_mismatch": self.mismatch / tokens,
            "tokens_trained": float(self.tokens),
            "micro_batches": float(self.micro_batches),
            "trainer_idle_fraction": min(1.0, self.waited_s / seconds) if seconds > 0 else 0.0,
            "publish_seconds": self.published_s,
            "staleness_max": float(max(0, step - oldest)),
            "response_tokens_mean": float(lengths.mean()) if granted else math.nan,
            "response_tokens_max": float(lengths.max(initial=0)),
            "reward_mean": float(rewards.mean()) if granted else math.nan,
            "reward_std": float(rewards.std()) if granted else math.nan,
            "degenerate_fraction": sum(is_degenerate(g.rewards) for g in granted) / len(granted)
            if granted
            else math.nan,
        }

    def critic_metrics(self, result: StepResult) -> dict[str, float]:
        """Further columns of a step with a critic."""
        return {
            "value_loss": self.value_loss / max(1.0, self.passed_weight),
            "value_clip_fraction": self.value_clipped / max(1, self.passed_tokens),
            "critic_grad_norm": math.nan if result.critic_grad_norm is None else result.critic_grad_norm,
        }


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
