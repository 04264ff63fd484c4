"""How a reward model is trained: ``reward.train`` of a job file, and the options of ``headrace train-reward``."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from configs.section import PositiveFloat, PositiveInt, Section

ANSWERS: Final = "answers"
"""Name of the preferences that are made of the data's own answers."""

RECORD: Final = "reward_training.json"
"""File of a trained model's directory that says how it was trained, and how well it ranks."""


class RewardTraining(Section):
    """A reward model that is trained before the run starts, on pairs of which one response is preferred."""

    preferences: str
    """A ``.jsonl``, ``.json`` or ``.parquet`` file with the columns ``chosen``, ``rejected`` and, if there is one,
    ``prompt``; each text or chat messages. ``answers``: made of the data's own answers, beside spoilt ones."""
    model: str | None = None
    """What it is made of: a Hugging Face directory of a language model or of a classifier with one label, or a hub
    name. Unset: the policy, ``model``, as it is before the run."""
    pairs: PositiveInt = 4000
    """``answers``: how many pairs are made."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the prompts (of pairs without one: of the pairs) that is not trained on, and tells the accuracy. What
    is held out follows from what a prompt says, so that no other pair and no seed changes it."""
    epochs: PositiveFloat = 1.0
    """How often each pair is seen, unless ``steps`` says it."""
    steps: PositiveInt | None = None
    """Optimizer steps."""
    batch_pairs: PositiveInt = 32
    """Pairs that one optimizer step consumes."""
    batch_tokens: PositiveInt = 16_384
    """Tokens of one forward and backward pass, padding included; a single pair may be longer."""
    lr: PositiveFloat = 1e-5
    """Learning rate of AdamW, reached after a tenth of the steps; then it falls to 0 in a line."""
