"""A reward model: a Hugging Face model for sequence classification with one label, in a process of its own.

    asked ──reward_text.py──▶ ids, cut on the left ──▶ batches of at most ``batch_tokens`` ──▶ logit

No code of the model's directory is run, and weights come from safetensors only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from actors.environments.errors import RewardRefused
from actors.environments.scoring.batches import Asked
from actors.environments.scoring.reward_text import NoRewardModel, RewardText, load_reward_tokenizer, token_batches
from actors.environments.scoring.scorer_frames import ScorerVerdict
from actors.host.import_guard import hide_broken_optionals
from actors.host.user_code import described
from actors.models.whole_model import WeightsNotWhole, load_whole
from configs.task_schema import Reward


class ModelScorer:
    """Scores with the model in ``reward.path``.

    Raises:
        RewardRefused: the directory holds no reward model, or not a whole one; says what is missing.
    """

    batch = 1 << 16
    """Number of responses at once, large enough for all: ``score`` makes batches itself, by tokens."""

    def __init__(self, where: str, reward: Reward) -> None:
        hide_broken_optionals()
        self._where = where
        self._path = Path(reward.path or "").expanduser()
        self._batch_tokens = reward.batch_tokens
        try:
            tokenizer = load_reward_tokenizer(self._path)
        except NoRewardModel as error:
            raise self._refused(str(error)) from error
        self._text = RewardText(self._load_model(reward.device), tokenizer)
        if reward.max_tokens is not None:
            if reward.max_tokens > self._text.longest:
                wrong = f"{reward.max_tokens}, and the model in {self._path} takes {self._text.longest}"
                raise RewardRefused(f"{where}.max_tokens: {wrong}")
            self._text.longest = reward.max_tokens

    def _refused(self, what: str) -> RewardRefused:
        return RewardRefused(f"{self._where}.path {self._path}: {what}")

    def _load_model(self, device: str) -> Any:
        import torch
        from transformers import AutoConfig, AutoModelForSequenceClassification

        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            config: Any = AutoConfig.from_pretrained(str(self._path), local_files_only=True, trust_remote_code=False)
            if config.num_labels != 1:
                raise self._refused(f"it has {config.num_labels} labels, and a reward model has one")
            auto: Any = AutoModelForSequenceClassification
            return load_whole(auto, self._path, use_safetensors=True, dtype="auto").to(device).eval()
        except RewardRefused:
            raise
        except WeightsNotWhole as error:
            raise self._refused(f"{error}. If it is a language model, name a trained reward model instead") from error
        except Exception as error:  # transformers and torch raise anything for files they cannot read
            raise self._refused(f"it cannot be loaded as a reward model: {described(error)}") from error

    def try_once(self, asked: Asked) -> ScorerVerdict:
        if isinstance(asked.example.prompt, list) and not self._text.has_template:
            raise self._refused(
                "its tokenizer has no chat template, and prompts are chat messages; put the template that it was "
                "trained with beside it as chat_template.jinja"
            )
        (found,) = self.score([asked], lambda: None)
        return found

    def score(self, asked: Sequence[Asked], alive: Callable[[], None]) -> list[ScorerVerdict]:
        import torch

        found = [ScorerVerdict(None, "")] * len(asked)
        ids: dict[int, tuple[list[int], bool]] = {}
        for i, one in enumerate(asked):
            try:
                ids[i] = self._text.ids(self._text.read(one.example.prompt, one.response, one.data))
            except Exception as error:  # noqa: BLE001 (a template is a program: its error is about this response)
                found[i] = ScorerVerdict(
                    None, f"the reward model's tokenizer or template refuses it: {described(error)}"
                )
        for rows in token_batches({i: len(tokens) for i, (tokens, _) in ids.items()}, self._batch_tokens):
            with torch.inference_mode():
                logits = self._text.logits([ids[i][0] for i in rows]).float().tolist()
            for i, value in zip(rows, logits, strict=True):
                found[i] = ScorerVerdict(value, cut=ids[i][1])
            alive()
        return found
