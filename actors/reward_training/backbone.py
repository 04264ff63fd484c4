"""The model that a reward model starts from: a language model, or a classifier with one label, and its tokenizer.

Its weights are trained in float32, whatever the files hold, since AdamW's steps are too small for bfloat16. A model
whose files are in half precision computes in bfloat16, and is written in the format that it came in. Dropout is off, so
that a text has one reward. Weights come from safetensors only, and no code of the directory is run.
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
from actors.models.model_errors import brief
from actors.models.whole_model import WeightsNotWhole, load_whole
from actors.reward_training.errors import CannotTrain

_CLASSIFIER = "ForSequenceClassification"
"""How the names of classes end that have a classification head, as a reward model has."""


@dataclass(frozen=True, slots=True)
class Backbone:
    """Holds a model with one logit, in float32 on its device."""

    model: Any
    tokenizer: Any
    text: RewardText
    kept_in: torch.dtype
    """Number format of its files."""

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """A context within which the model computes in the number format of its files (bfloat16 for half precision)."""
        if self.model.dtype == self.kept_in:
            return contextlib.nullcontext()
        return torch.autocast(self.model.device.type, torch.bfloat16)

    def as_kept(self) -> None:
        """Convert the weights to the number format of the model's files."""
        self.model.to(self.kept_in)


def load_backbone(
    path: Path, *, seed: int, device: str, max_tokens: int | None, named: Callable[[str], str]
) -> Backbone:
    """Load the model in ``path``; missing weights of the head are drawn from ``seed``.

    Raises:
        CannotTrain: not a usable model, device or ``max_tokens``; ``named`` spells a setting as the user wrote it.
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
    _name_padding(model, tokenizer)
    text = RewardText(model, tokenizer)
    if max_tokens is not None and max_tokens > text.longest:
        raise CannotTrain(f"{named('max_tokens')} {max_tokens}: the model in {path} takes {text.longest}; lower it")
    text.longest = max_tokens or text.longest
    return Backbone(model.to(device).eval(), tokenizer, text, kept_in)


def _load(path: Path, where: str) -> tuple[Any, torch.dtype]:
    try:
        config: Any = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        classifies = any(str(name).endswith(_CLASSIFIER) for name in config.architectures or [])
        if classifies and config.num_labels != 1:
            raise CannotTrain(
                f"{where}: it has {config.num_labels} labels, and a reward model has one; name a language model, or a "
                "classifier with num_labels 1"
            )
        how: dict[str, Any] = {"num_labels": 1, "dtype": torch.float32, "use_safetensors": True}
        model = load_whole(AutoModelForSequenceClassification, path, new_head=True, **how)
    except CannotTrain:
        raise
    except WeightsNotWhole as error:
        raise CannotTrain(f"{where}: {error}") from error
    except Exception as error:  # transformers and torch raise errors of any type for unreadable files
        raise CannotTrain(f"{where}: it cannot be loaded as a model that classifies ({brief(error)})") from error
    kept_in = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return model, kept_in


def _name_padding(model: Any, tokenizer: Any) -> None:
    """Tell a model that knows no pad token its tokenizer's, so that others can score batches with what is written.

    Not one that is the end token too, since the reward is read before the padding, nor one beyond the embedding.
    """
    config, pad = model.config.get_text_config(), tokenizer.pad_token_id
    known = pad is not None and pad < model.get_input_embeddings().weight.shape[0]
    if getattr(config, "pad_token_id", None) is None and known and pad != tokenizer.eos_token_id:
        config.pad_token_id = model.config.pad_token_id = pad
