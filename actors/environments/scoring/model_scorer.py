"""A reward model: a Hugging Face model for sequence classification with one label, in a process of its own.

    prompt, response ──its own chat template──▶ text ──its own tokenizer──▶ ids, cut on the left ──▶ batches ──▶ logit

A batch holds responses of like length, at most ``batch_tokens`` with padding, which is on the right and masked. What is
too long for the model loses its beginning, since such models read the reward at the end; who was cut is told.

Where the tokenizer has no chat template, text is the prompt and the response, one after the other.

No code of the model's directory is run, and weights come from safetensors only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from actors.environments.errors import RewardRefused, ScorerBroken
from actors.environments.scoring.batches import Asked, Found
from actors.environments.scoring.user_code import described
from actors.host.import_guard import hide_broken_optionals
from configs.task_schema import Reward


class ModelScorer:
    """Scores with the model in ``reward.path``.

    Raises:
        RewardRefused: it is no reward model, or not whole; says what it lacks.
    """

    batch = 1 << 16
    """All that is asked at once: it makes batches of its own, by tokens."""

    def __init__(self, where: str, reward: Reward) -> None:
        hide_broken_optionals()
        self._where = where
        self._path = Path(reward.path or "").expanduser()
        self._batch_tokens = reward.batch_tokens
        self._tokenizer = self._load_tokenizer()
        self._model, self._device = self._load_model(reward.device)
        self._longest = self._limit(reward.max_tokens)

    def _refused(self, what: str) -> RewardRefused:
        return RewardRefused(f"{self._where}.path {self._path}: {what}")

    def _load_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(
                str(self._path), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # each kind of tokenizer file fails in a way of its own
            raise self._refused(
                f"it has no tokenizer that can be read ({described(error)}); save its own there"
            ) from error
        if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
            raise self._refused("its tokenizer has neither a pad token nor an end token; give it one of them")
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer.truncation_side = "left"
        tokenizer.padding_side = "right"
        return tokenizer

    def _load_model(self, device: str) -> tuple[Any, str]:
        import torch
        from transformers import AutoConfig, AutoModelForSequenceClassification

        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        how: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            config: Any = AutoConfig.from_pretrained(str(self._path), **how)
            if config.num_labels != 1:
                raise self._refused(f"it has {config.num_labels} labels, and a reward model has one")
            auto: Any = AutoModelForSequenceClassification
            model, told = auto.from_pretrained(
                str(self._path), use_safetensors=True, dtype="auto", output_loading_info=True, **how
            )
            if missing := sorted(told["missing_keys"]):
                raise self._refused(
                    f"its weights lack {', '.join(missing[:3])}, which would be drawn at random: it is a language "
                    "model, or was saved without its head; name a trained reward model"
                )
            model.config.get_text_config().pad_token_id = model.config.pad_token_id = self._tokenizer.pad_token_id
            return model.to(device).eval(), device
        except RewardRefused:
            raise
        except Exception as error:  # whatever transformers and torch raise for files that are none of theirs
            raise self._refused(f"it cannot be loaded as a reward model: {described(error)}") from error

    def _limit(self, wanted: int | None) -> int:
        """Tokens that the model reads, at most."""
        takes = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        limits = [self._tokenizer.model_max_length, *([takes] if isinstance(takes, int) and takes > 0 else [])]
        if wanted is not None and wanted > min(limits):
            raise RewardRefused(
                f"{self._where}.max_tokens: {wanted}, and the model in {self._path} takes {min(limits)}"
            )
        return min([*limits, *([wanted] if wanted else [])])

    def try_once(self, asked: Asked) -> Found:
        if isinstance(asked.example.prompt, list) and not self._tokenizer.chat_template:
            raise self._refused(
                "its tokenizer has no chat template, and prompts are chat messages; put the template that it was "
                "trained with beside it as chat_template.jinja"
            )
        (found,) = self.score([asked], lambda: None)
        return found

    def score(self, asked: Sequence[Asked], alive: Callable[[], None]) -> list[Found]:
        import torch

        found = [Found(None, "")] * len(asked)
        ids: dict[int, tuple[list[int], bool]] = {}
        for i, one in enumerate(asked):
            try:
                ids[i] = self._encode(one)
            except Exception as error:  # noqa: BLE001 (a template is a program: what it raises is about this one)
                found[i] = Found(None, f"the reward model's tokenizer or template refuses it: {described(error)}")
        for rows in self._batches({i: len(tokens) for i, (tokens, _) in ids.items()}):
            batch = self._tokenizer.pad({"input_ids": [ids[i][0] for i in rows]}, return_tensors="pt").to(self._device)
            with torch.inference_mode():
                logits = self._model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            for i, value in zip(rows, logits[:, 0].float().tolist(), strict=True):
                found[i] = Found(value, "", ids[i][1])
            alive()
        return found

    def _encode(self, asked: Asked) -> tuple[list[int], bool]:
        """Its token ids, and whether it was cut."""
        text, templated = self._text(asked)
        how: dict[str, Any] = {"add_special_tokens": not templated, "verbose": False}
        ids = cast("list[int]", self._tokenizer(text, **how)["input_ids"])
        if len(ids) <= self._longest:
            if not ids:
                raise ScorerBroken("it has no token")
            return ids, False
        return self._tokenizer(text, truncation=True, max_length=self._longest, **how)["input_ids"], True

    def _text(self, asked: Asked) -> tuple[str, bool]:
        prompt, data = asked.example.prompt, asked.data
        if isinstance(prompt, str):
            prompt = data.template.replace("{prompt}", prompt)
            if not self._tokenizer.chat_template:
                return prompt + asked.response, False
            messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
        else:
            messages = [dict(message) for message in prompt]
        chat = data.chat or not isinstance(asked.example.prompt, str)
        if data.system_prompt and chat and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": data.system_prompt})
        if messages[-1].get("role") == "assistant":  # the beginning of the response
            messages[-1]["content"] += asked.response
        else:
            messages.append({"role": "assistant", "content": asked.response})
        return cast("str", self._tokenizer.apply_chat_template(messages, tokenize=False)), True

    def _batches(self, lengths: dict[int, int]) -> Iterator[list[int]]:
        """Places of responses, those of like length together, at most ``batch_tokens`` with their padding."""
        rows: list[int] = []
        for i in sorted(lengths, key=lambda i: (lengths[i], i)):
            if rows and (len(rows) + 1) * lengths[i] > self._batch_tokens:
                yield rows
                rows = []
            rows.append(i)
        if rows:
            yield rows
