"""How the policy learns from rewards: the sections ``algorithm`` and ``critic`` of a job file.

    algorithm.name ─▶ defaults of the other keys (``PRESETS``) ─▶ a key that the job gives overrides its default

grpo, dr_grpo, dapo, gspo, cispo, rloo    rewards of siblings are compared with each other
reinforce_pp_baseline                     the same, then whitened over the step
reinforce_pp                              rewards of the whole step are compared
ppo                                       a critic predicts the reward at each token; ``critic`` says which
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, cast

from pydantic import Field, model_validator

from configs.section import NonNegativeInt, PositiveFloat, PositiveInt, Section

UnitInterval = Annotated[float, Field(ge=0, le=1)]
NonNegativeFloat = Annotated[float, Field(ge=0)]

RuleName = Literal[
    "grpo", "dr_grpo", "rloo", "ppo", "reinforce_pp", "reinforce_pp_baseline", "dapo", "gspo", "cispo"
]  # fmt: skip
Surrogate = Literal["clipped", "sequence", "weighted"]
"""Objectives to maximise: PPO's clipped ratio of a token, the same of a sequence, or a weighted log-probability."""
LossMean = Literal["token", "sequence", "sequence_sum", "constant"]
Correction = Literal["none", "tis", "icepop", "sequence_mask"]
KlKind = Literal["k1", "k2", "k3", "k3_with_k2_gradient"]

PRESETS: Final[dict[str, dict[str, Any]]] = {
    "dr_grpo": {"loss_mean": "constant"},
    "rloo": {"loss_mean": "sequence_sum"},
    "ppo": {"kl_kind": "k1"},
    "reinforce_pp": {"kl_kind": "k1"},
    "reinforce_pp_baseline": {"kl_kind": "k2"},
    "dapo": {"clip_high": 0.28, "filter": "spread"},
    "gspo": {"loss_mean": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"clip_low": 1.0, "clip_high": 5.0, "correction": "none"},
}
"""Keys of ``algorithm`` whose default depends on its name."""
CAPS: Final[dict[str, float]] = {"tis": 2.0, "icepop": 5.0, "sequence_mask": 3.0}
"""Default of ``importance_cap`` for each correction."""


class OverlongConfig(Section):
    """A penalty for responses that end just before the limit, or by it (DAPO's soft overlong punishment)."""

    buffer_tokens: PositiveInt
    """Last tokens before ``rollout.max_tokens`` over which the reward falls by 1, in a line."""


class AlgorithmConfig(Section):
    """The learning rule. A key that is not given has the default of ``name``, where that has one of its own."""

    name: RuleName = "grpo"
    """What the rule is called. It says how rewards become advantages and what is maximised, and gives the other keys
    their defaults. ``ppo`` trains a critic (``critic``)."""
    group_size: PositiveInt = 8
    """Samples per prompt; at least 2 where siblings are compared, which ``ppo`` and ``reinforce_pp`` do not."""
    prompts_per_step: PositiveInt = 32
    """Prompts that one step consumes."""
    minibatches: PositiveInt = 1
    """Optimizer updates in one pass over a step: its prompts, in order, are cut into so many parts of about equal
    size. A step is one version of the weights, however many updates it has."""
    epochs: PositiveInt = 1
    """Passes over a step's samples, each of ``minibatches`` updates."""
    clip_low: PositiveFloat = 0.2
    """A token whose ratio to the old policy falls below 1 - this is not pushed further down. The old policy is the
    one before the step, or for a stale token the one that generated it. ``gspo``: 0.0003, of the sequence's ratio;
    ``cispo``: 1, so that weights have no lower bound."""
    clip_high: PositiveFloat = 0.2
    """A token whose ratio rises above 1 + this is not pushed further up. ``dapo``: 0.28; ``gspo``: 0.0004; ``cispo``:
    5, bound of the weight."""
    loss_mean: LossMean = "token"
    """What the loss is a mean over. ``token``: the step's tokens; ``sequence``: sequences, each the mean of its tokens
    (``gspo``); ``sequence_sum``: sequences, each the sum of its tokens (``rloo``); ``constant``: as many tokens as the
    sequences could have had (``dr_grpo``)."""
    correction: Correction = "tis"
    """What is done where the trainer's and the engine's probability of a token differ, by numerics or by staleness.
    ``tis``: the ratio is the token's weight, up to ``importance_cap``; ``icepop``: the same, and 0 for one below
    ``importance_floor`` or above ``importance_cap``; ``sequence_mask``: the product of a sequence's ratios is its
    weight, and 0 if above ``importance_cap``; ``none``: nothing (``cispo``, whose weight is the ratio already)."""
    importance_cap: PositiveFloat = 2.0
    """Upper bound of ``correction``. Default with ``icepop``: 5; with ``sequence_mask``: 3."""
    importance_floor: NonNegativeFloat = 0.5
    """``icepop``: lower bound."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Above 0 a frozen reference model is kept. ``ppo``, ``reinforce_pp``: each token's reward is lowered by this
    times log-probability of the policy minus that of the reference; others: this times an estimate of the KL is part
    of the loss."""
    kl_kind: KlKind = "k3"
    """The estimate in the loss, with d = log-probability of the reference minus that of the policy. ``k1``: -d;
    ``k2``: d²/2 (``reinforce_pp_baseline``); ``k3``: exp(d) - d - 1; ``k3_with_k2_gradient``: value of k3, gradient
    of k2. In rewards it is ``k1``."""
    kl_unbiased: bool = False
    """Weigh the estimate in the loss by the ratio of the policy to what generated. The weight of ``k1`` and ``k3`` has
    a gradient, too: of each kind the whole gradient is then that of the KL."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Bonus in the loss: this times the entropy of the distribution that each token was drawn from."""
    load_balancing: NonNegativeFloat | None = None
    """Mixtures of experts: weight of the load-balancing loss of Switch Transformers in the loss, the mean over layers;
    0.001 is usual. 0: not in the loss, but measured, as ``expert_imbalance``. Unset: not measured either."""
    gamma: UnitInterval = 1.0
    """``ppo``, ``reinforce_pp``: discount of the rewards of later tokens."""
    gae_lambda: UnitInterval = 0.95
    """``ppo``: how far advantages trust rewards that came (1) rather than the critic (0)."""
    filter: Literal["none", "spread"] = "none"
    """``spread`` (``dapo``): a step keeps its first ``prompts_per_step`` groups whose rewards differ, in prompt order,
    and asks for further prompts until it has them. Needs ``sync.mode: sync``."""
    filter_batches: PositiveInt = 10
    """``filter: spread``: a step reads at most this many times ``prompts_per_step`` prompts; then it trains what there
    is, and says so."""
    overlong: OverlongConfig | None = None
    """Set: rewards are lowered for responses close to the length limit, after the scorer and before advantages."""
    advantage: str | None = None
    """A function of yours, ``package.module:function``, in place of the rule's comparison of siblings
    (``docs/guides/learning_rules.md``)."""
    loss: str | None = None
    """A function of yours, ``package.module:function``, in place of what the rule maximises."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_name(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = cast("dict[str, Any]", data)
        found = PRESETS.get(str(given.get("name", "grpo")), {}) | given
        cap = CAPS.get(str(found.get("correction", "tis")))
        return found if cap is None else {"importance_cap": cap} | found

    @property
    def siblings_min(self) -> int:
        """Number of a prompt's rewarded samples below which they teach nothing."""
        return 2 if self.compares_siblings else 1

    @property
    def compares_siblings(self) -> bool:
        return self.name not in ("ppo", "reinforce_pp")

    @property
    def has_critic(self) -> bool:
        return self.name == "ppo"

    @property
    def whitens(self) -> bool:
        """Whether each token has its own advantage, whitened over the whole step."""
        return self.name in ("ppo", "reinforce_pp", "reinforce_pp_baseline")

    @property
    def kl_in_rewards(self) -> bool:
        return self.name in ("ppo", "reinforce_pp")

    @property
    def updates(self) -> int:
        """Optimizer updates in a step."""
        return self.epochs * self.minibatches

    @property
    def needs_whole_step(self) -> bool:
        """Whether nothing can be trained before all of a step is there."""
        return self.whitens or self.updates > 1

    @property
    def surrogate(self) -> Surrogate:
        found: dict[str, Surrogate] = {"gspo": "sequence", "cispo": "weighted"}
        return found.get(self.name, "clipped")


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
    """In updates after the first (``algorithm.epochs``, ``algorithm.minibatches``) a value that has moved further than
    this from where it was is not pushed further; 0: no limit."""
