"""How the policy learns from rewards: the sections ``algorithm`` and ``critic`` of a job file.

grpo, dr_grpo, rloo    rewards of siblings are compared with each other      ``critic`` plays no part
ppo                    a critic says what to expect of each token            ``critic`` says which, and how it learns
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from configs.section import NonNegativeInt, PositiveFloat, PositiveInt, Section

UnitInterval = Annotated[float, Field(ge=0, le=1)]


class AlgorithmConfig(Section):
    """The learning rule."""

    name: Literal["grpo", "dr_grpo", "rloo", "ppo"] = "grpo"
    """How rewards become advantages, and what the summed loss is divided by. ``ppo`` trains a critic (``critic``)."""
    group_size: PositiveInt = 8
    """Samples per prompt; at least 2 where siblings are compared, which ``ppo`` does not."""
    prompts_per_step: PositiveInt = 32
    """Prompts that one optimizer step consumes."""
    clip_low: PositiveFloat = 0.2
    """A stale token whose ratio falls below 1 - this is not pushed further down."""
    clip_high: PositiveFloat = 0.2
    """A stale token whose ratio rises above 1 + this is not pushed further up."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Above 0 a frozen reference model is kept. ``ppo``: each token's reward is lowered by this times log-probability
    of the policy minus that of the reference; others: this times the k3 estimate is part of the loss."""
    importance_cap: PositiveFloat = 2.0
    """Truncated importance sampling: cap of the trainer/engine probability ratio."""
    gamma: UnitInterval = 1.0
    """``ppo``: discount of the rewards of later tokens."""
    gae_lambda: UnitInterval = 0.95
    """``ppo``: how far advantages trust rewards that came (1) rather than the critic (0)."""
    epochs: PositiveInt = 1
    """``ppo``: passes over a step's samples, each with an update of both models. In passes after the first every token
    counts as stale."""

    @property
    def siblings_min(self) -> int:
        """Rewards of a prompt's samples below which these teach nothing."""
        return 1 if self.name == "ppo" else 2


class CriticConfig(Section):
    """The critic of ``algorithm.name: ppo``: a second model of the trainer, with one value a token.

    Optimizer, schedule, weight decay and gradient norm are those of ``trainer``, but for the rate.
    """

    path: str | None = None
    """A Hugging Face directory with the policy's tokenizer: a causal language model, or a reward model, whose head of
    one label becomes the value head. Unset: the policy's own model, with a new value head."""
    reward: str | None = None
    """In place of ``path``: the name of a reward of this job with ``kind: model``, as whose model the critic begins,
    also where the job trains it. A reward that is the only one is called ``model``."""
    lr: PositiveFloat = 1e-5
    """Learning rate of its AdamW; it follows ``trainer.warmup_steps`` and ``trainer.lr_schedule``."""
    warmup_steps: NonNegativeInt = 0
    """First steps of the job that train the critic alone; the policy stays as it is."""
    value_clip: Annotated[float, Field(ge=0)] = 0.2
    """In passes after the first (``algorithm.epochs``) a value that has moved further than this from where it was is
    not pushed further; 0: no limit."""
