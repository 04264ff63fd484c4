"""What a reward model reads of a prompt and a response: the same when the model is trained and when it scores.

    prompt, response ──its own chat template──▶ text ──its own tokenizer──▶ ids, cut on the left ──▶ batches ──▶ logit

A reward is what transformers says of the text alone. A batch holds texts of similar length and is bounded in tokens,
including padding, which is on the right and masked; a model that says something else of a padded text reads each alone.
A text that is too long for the model loses its beginning, since such models read the reward at the end; it is reported.

Where the tokenizer has no chat template, the text is the prompt followed by the response.

No code of the model's directory is run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from actors.environments.errors import RewardRefused, ScorerBroken
from actors.environments.prompts.rows import Chat, messages_of
from actors.host.user_code import described
from configs.schema import DataConfig


class NoRewardModel(RewardRefused):
    """A directory holds no tokenizer of a reward model; the message continues after the directory's name."""


def load_reward_tokenizer(path: Path) -> Any:
    """The tokenizer in ``path``, which cuts on the left.

    Raises:
        NoRewardModel: there is no tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each kind of tokenizer file fails in a way of its own
        raise NoRewardModel(f"it has no tokenizer that can be read ({described(error)}); save its own there") from error
    tokenizer.truncation_side = "left"
    return tokenizer


class RewardText:
    """Turns prompts and responses into what one reward model reads."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        config = model.config.get_text_config()
        takes = getattr(config, "max_position_embeddings", None)
        before = _padding_position(model) + 1
        takes = takes - before if isinstance(takes, int) and takes > before else 1 << 62
        self.longest = min(tokenizer.model_max_length, takes)
        """Most tokens that the model reads."""
        self._vocabulary: int = model.get_input_embeddings().weight.shape[0]
        pad: int | None = getattr(config, "pad_token_id", None)
        self._pad = pad if pad is not None and 0 <= pad < self._vocabulary else None
        """The pad token that the model knows, which may be the end token. The reward is read at the last other one."""
        self._batches: bool | None = None
        """Whether the model says of texts in a padded batch what it says of each alone; None: not tried yet."""
        self._model = model
        self._tokenizer = tokenizer

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer can render chat messages."""
        return bool(self._tokenizer.chat_template)

    def read(self, prompt: str | Chat, response: str, data: DataConfig) -> str | Chat:
        """``response`` behind its prompt: messages, or one text where there is no template."""
        if isinstance(prompt, str) and not self.has_template:
            return data.template.replace("{prompt}", prompt) + response
        if isinstance(prompt, str) and not data.chat:  # the policy has read no system prompt
            data = data.model_copy(update={"system_prompt": None})
        messages = [dict(message) for message in messages_of(prompt, data)]
        if messages[-1].get("role") == "assistant":  # the beginning of the response
            messages[-1]["content"] += response
        else:
            messages.append({"role": "assistant", "content": response})
        return messages

    def ids(self, read: str | Chat) -> tuple[list[int], bool]:
        """Token ids of a text or of messages, and whether they were cut.

        Raises:
            ScorerBroken: there is no token, or one that the model does not know.
            Exception: whatever a template, which is a program, or the tokenizer raises.
        """
        templated = not isinstance(read, str)
        text = self._tokenizer.apply_chat_template(read, tokenize=False) if templated else read
        how: dict[str, Any] = {"add_special_tokens": not templated, "verbose": False}
        ids = cast("list[int]", self._tokenizer(text, **how)["input_ids"])
        if not ids:
            raise ScorerBroken("it has no token")
        if (most := max(ids)) >= self._vocabulary:
            token = self._tokenizer.convert_ids_to_tokens(most)
            padding = ", its pad token," if most == self._tokenizer.pad_token_id else ""
            raise ScorerBroken(
                f"its token {token!r}{padding} has id {most}, beyond the model's vocabulary of {self._vocabulary}: a "
                "token was added to the tokenizer and the model not resized"
            )
        if len(ids) <= self.longest:
            return ids, False
        return self._tokenizer(text, truncation=True, max_length=self.longest, **how)["input_ids"], True

    def logits(self, rows: Sequence[list[int]]) -> Any:
        """float[len(rows)] the model's logit of each row, on the model's device and with gradient."""
        if self._batches is None:
            self._batches = self._padding_is_ignored()
        if len(rows) == 1 or self._batches:
            return self._padded(rows)
        import torch

        return torch.cat([self._padded([row]) for row in rows])

    def _padded(self, rows: Sequence[list[int]]) -> Any:
        """The model's logit of each row. transformers reads the last token that is not padding, by its id.

        So where the model has no pad token, and reads the very last one, padding is a token that ends no row.
        """
        import torch

        if len(rows) >= self._vocabulary:
            half = len(rows) // 2
            return torch.cat([self._padded(rows[:half]), self._padded(rows[half:])])
        config, ends = self._model.config, {row[-1] for row in rows}
        pad = self._pad if self._pad is not None else next(i for i in range(self._vocabulary) if i not in ends)
        width = max(map(len, rows))
        ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], device=self._model.device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=self._model.device)
        both = (config, config.get_text_config())
        kept = [getattr(one, "pad_token_id", None) for one in both]
        try:
            for one in both:
                one.pad_token_id = pad
            return self._model(input_ids=ids, attention_mask=mask).logits[:, 0]
        finally:
            for one, before in zip(both, kept, strict=True):
                one.pad_token_id = before

    def _padding_is_ignored(self) -> bool:
        """Try it on an example. Recurrent models, and some that read a fixed place, see padding.

        Those with a decoder of their own want the same number of end tokens in each row, so they get no batches.
        """
        import torch

        if getattr(self._model.config, "is_encoder_decoder", False):
            return False
        draw = random.Random(0)
        tokens = min(12, self.longest)
        rows = [draw.choices([i for i in range(min(self._vocabulary, 1000)) if i != self._pad], k=tokens)]
        rows += [rows[0][: tokens // 3 or 1], rows[0][tokens // 2 :]]
        with torch.no_grad():
            alone = torch.cat([self._padded([row]) for row in rows])
            try:
                together = self._padded(rows)
            except (TypeError, ValueError, RuntimeError, IndexError):
                return False
        tolerance = 1e-3 if alone.dtype == torch.float32 else 0.1
        scale = max(1.0, alone.abs().max().item())
        return bool((alone - together).abs().max().item() < tolerance * scale)


def _padding_position(model: Any) -> int:
    """The position that padding has in models of RoBERTa's kind, whose texts begin after it; -1 elsewhere."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and (place := getattr(module, "padding_idx", None)) is not None:
            return int(place)
    return -1


def token_batches(lengths: Mapping[int, int], tokens_max: int) -> Iterator[list[int]]:
    """Keys of ``lengths`` in batches of similar length, at most ``tokens_max`` padded; one alone may exceed it."""
    rows: list[int] = []
    for i in sorted(lengths, key=lambda i: (lengths[i], i)):
        if rows and (len(rows) + 1) * lengths[i] > tokens_max:
            yield rows
            rows = []
        rows.append(i)
    if rows:
        yield rows
