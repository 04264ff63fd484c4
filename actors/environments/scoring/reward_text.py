"""What a reward model reads of a prompt and a response: the same for whoever trains one and for whoever scores with it.

    prompt, response ──its own chat template──▶ text ──its own tokenizer──▶ ids, cut on the left ──▶ batches ──▶ logit

A batch holds texts of like length, at most so many tokens with padding, which is on the right and masked. What is too
long for the model loses its beginning, since such models read the reward at the end; who was cut is told.

Where the tokenizer has no chat template, text is the prompt and the response, one after the other.

No code of the model's directory is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from actors.environments.errors import RewardRefused, ScorerBroken
from actors.environments.prompts.rows import Chat
from actors.environments.scoring.user_code import described
from configs.schema import DataConfig


class NoRewardModel(RewardRefused):
    """A directory holds no tokenizer of a reward model; the message goes on after its name."""


def load_reward_tokenizer(path: Path) -> Any:
    """The tokenizer in ``path``, which pads on the right and cuts on the left.

    Raises:
        NoRewardModel: there is none, or it can neither pad nor end.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each kind of tokenizer file fails in a way of its own
        raise NoRewardModel(f"it has no tokenizer that can be read ({described(error)}); save its own there") from error
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
        raise NoRewardModel("its tokenizer has neither a pad token nor an end token; give it one of them")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.truncation_side = "left"
    tokenizer.padding_side = "right"
    return tokenizer


class RewardText:
    """Makes of prompts and responses what one reward model reads."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        """``model``: learns which token is padding, since it gives the logit of the last one that is none."""
        model.config.get_text_config().pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id
        takes = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.longest = min(tokenizer.model_max_length, takes if isinstance(takes, int) and takes > 0 else 1 << 62)
        """Tokens that are read, at most."""
        self._model = model
        self._tokenizer = tokenizer

    @property
    def has_template(self) -> bool:
        """Whether chat messages can be read."""
        return bool(self._tokenizer.chat_template)

    def read(self, prompt: str | Chat, response: str, data: DataConfig) -> str | Chat:
        """``response`` behind its prompt: messages, or one text where there is no template."""
        if isinstance(prompt, str):
            prompt = data.template.replace("{prompt}", prompt)
            if not self.has_template:
                return prompt + response
            messages: Chat = [{"role": "user", "content": prompt}]
            chat = data.chat
        else:
            messages, chat = [dict(message) for message in prompt], True
        if data.system_prompt and chat and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": data.system_prompt})
        if messages[-1].get("role") == "assistant":  # the beginning of the response
            messages[-1]["content"] += response
        else:
            messages.append({"role": "assistant", "content": response})
        return messages

    def ids(self, read: str | Chat) -> tuple[list[int], bool]:
        """Token ids of a text or of messages, and whether they were cut.

        Raises:
            ScorerBroken: it has no token.
            Exception: whatever a template, which is a program, or the tokenizer raises.
        """
        templated = not isinstance(read, str)
        text = self._tokenizer.apply_chat_template(read, tokenize=False) if templated else read
        how: dict[str, Any] = {"add_special_tokens": not templated, "verbose": False}
        ids = cast("list[int]", self._tokenizer(text, **how)["input_ids"])
        if not ids:
            raise ScorerBroken("it has no token")
        if len(ids) <= self.longest:
            return ids, False
        return self._tokenizer(text, truncation=True, max_length=self.longest, **how)["input_ids"], True

    def logits(self, rows: Sequence[list[int]]) -> Any:
        """float[len(rows)] the model's logit of each, on its device and with its gradient."""
        batch = self._tokenizer.pad({"input_ids": list(rows)}, return_tensors="pt")
        batch = batch.to(self._model.device)
        return self._model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]


def token_batches(lengths: Mapping[int, int], tokens_max: int) -> Iterator[list[int]]:
    """Places, those of like length together, at most ``tokens_max`` with their padding; a single one may be longer."""
    rows: list[int] = []
    for i in sorted(lengths, key=lambda i: (lengths[i], i)):
        if rows and (len(rows) + 1) * lengths[i] > tokens_max:
            yield rows
            rows = []
        rows.append(i)
    if rows:
        yield rows
