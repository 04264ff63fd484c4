"""The model that a reward model is made of: a language model, or a classifier with one label, with its tokenizer.

Its weights are trained in float32, whatever they are kept in, for AdamW's steps are smaller than bfloat16 can tell; a
model that is kept in half precision computes in bfloat16, and is written as it came. Dropout is off, so that a text has
one reward. Weights come from safetensors only, and no code of the directory is run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from actors.environments.scoring.reward_text import NoRewardModel, RewardText, load_reward_tokenizer
from actors.host.model_errors import brief
from actors.reward_training.errors import CannotTrain

_CLASSIFIER = "ForSequenceClassification"
"""End of the names of classes whose head is a reward model's."""


@dataclass(frozen=True, slots=True)
class Backbone:
    """Holds a model with one logit, in float32 on its device."""

    model: Any
    tokenizer: Any
    text: RewardText
    kept_in: torch.dtype
    """Number format of its files."""

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """Within it the model computes as one of its number format does."""
        if self.model.dtype == self.kept_in:
            return contextlib.nullcontext()
        return torch.autocast(self.model.device.type, torch.bfloat16)

    def as_kept(self) -> None:
        """Give the weights the number format in which they are written."""
        self.model.to(self.kept_in)


def load_backbone(
    path: Path, *, seed: int, device: str, max_tokens: int | None, named: Callable[[str], str]
) -> Backbone:
    """The model in ``path``; what its head lacks is drawn from ``seed``. ``named``: a setting as the user wrote it.

    Raises:
        CannotTrain: it is none, or cannot take what is asked.
    """
    where = f"{named('model')} {path}"
    if device == "cuda" and not torch.cuda.is_available():
        raise CannotTrain(f"{named('device')} cuda: this machine has no CUDA device; use auto or cpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        tokenizer = load_reward_tokenizer(path)
    except NoRewardModel as error:
        raise CannotTrain(f"{where}: {error}") from error
    torch.manual_seed(seed)
    model, kept_in = _load(path, where)
    text = RewardText(model, tokenizer)
    if max_tokens is not None and max_tokens > text.longest:
        raise CannotTrain(f"{named('max_tokens')} {max_tokens}: the model in {path} takes {text.longest}; lower it")
    text.longest = max_tokens or text.longest
    return Backbone(model.to(device).eval(), tokenizer, text, kept_in)


def _load(path: Path, where: str) -> tuple[Any, torch.dtype]:
    how: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config: Any = AutoConfig.from_pretrained(str(path), **how)
        classifies = any(str(name).endswith(_CLASSIFIER) for name in config.architectures or [])
        if classifies and config.num_labels != 1:
            raise CannotTrain(
                f"{where}: it has {config.num_labels} labels, and a reward model has one; name a language model, or a "
                "classifier with num_labels 1"
            )
        auto: Any = AutoModelForSequenceClassification
        model, told = auto.from_pretrained(
            str(path), num_labels=1, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **how
        )
    except CannotTrain:
        raise
    except Exception as error:  # whatever transformers and torch raise for files that are none of theirs
        raise CannotTrain(f"{where}: it cannot be loaded as a model that classifies ({brief(error)})") from error
    body = f"{model.base_model_prefix}."
    if lacking := sorted(key for key in told["missing_keys"] if key.startswith(body) and "pooler" not in key):
        raise CannotTrain(
            f"{where}: its weights lack {', '.join(lacking[:3])}, which would be drawn at random; fetch or save it anew"
        )
    kept_in = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return model, kept_in
