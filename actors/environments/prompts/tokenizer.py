"""Text to token ids and back, by tokenizer and chat template as transformers itself applies them.

    prompt ─ messages? or data.chat ─ yes ─▶ apply_chat_template ─▶ ids, text
                                     └ no ──▶ data.template ─▶ tokenizer(text) ─▶ ids, text

Invariants
- Ids come from ``AutoTokenizer`` itself; truncation and padding that a tokenizer.json carries from earlier calls have
  no influence, since each call sets both.
- Special tokens come once: from the template where there is one, else from the tokenizer.
- Ids that the tokenizer lacks (a vocabulary padded for speed has such rows, and a model may draw them) have no text.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from actors.environments.errors import PromptRefused, SourceUnreadable
from actors.environments.prompts.rows import Chat, messages_of
from actors.host.import_guard import hide_broken_optionals
from configs.model_files import text_config
from configs.schema import DataConfig


def load_tokenizer(model_path: Path) -> Any:
    """The tokenizer of an HF directory, as ``AutoTokenizer`` makes it. No code from the directory is run.

    Raises:
        SourceUnreadable: transformers cannot make one.
    """
    if "transformers" not in sys.modules:  # else transformers has looked already, or was told there is no torch
        hide_broken_optionals()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(model_path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each kind of tokenizer file fails in a way of its own
        raise SourceUnreadable(
            f"model.path {model_path}: transformers cannot load its tokenizer ({type(error).__name__}: {error}); "
            "save the model's tokenizer beside it"
        ) from error


class TextCodec:
    """Encodes prompts as the job file says and decodes responses.

    Raises:
        SourceUnreadable: the directory has no tokenizer, or a chat template is needed and missing.
    """

    def __init__(
        self, model_path: Path, data: DataConfig, *, special_tokens: bool = False, tokenizer: Any = None
    ) -> None:
        self._tokenizer = load_tokenizer(model_path) if tokenizer is None else tokenizer
        self._data = data
        self._directory = model_path
        self._hides_specials = not special_tokens
        if data.chat and not self._tokenizer.chat_template:
            raise SourceUnreadable(
                f"data.chat is set, but the tokenizer in {model_path} has no chat template; unset it or add one"
            )

    def for_data(self, data: DataConfig) -> TextCodec:
        """The same tokenizer for prompts with other settings of ``data``."""
        return TextCodec(self._directory, data, special_tokens=not self._hides_specials, tokenizer=self._tokenizer)

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    def encode(self, prompt: str | Chat) -> tuple[str, np.ndarray]:
        """The text that the model sees and its token ids, int32[n].

        Raises:
            PromptRefused: the chat template or the tokenizer refuses it; the message is theirs.
        """
        try:
            if isinstance(prompt, list) or self._data.chat:
                text, ids = self._from_template(messages_of(prompt, self._data))
            else:
                text = self._data.template.replace("{prompt}", prompt)
                ids = self._tokenizer(text, verbose=False)["input_ids"]
        except Exception as error:  # a template is a program, and may refuse a prompt by any exception
            who = "chat template or tokenizer" if isinstance(prompt, list) or self._data.chat else "tokenizer"
            raise PromptRefused(f"the model's {who} refuses the prompt: {_words(error)}") from error
        if ids and max(ids) >= self._rows:
            token = self._tokenizer.convert_ids_to_tokens(max(ids))
            raise PromptRefused(
                f"the prompt has the token {token!r} ({max(ids)}), and the model's vocab_size is {self._rows}: "
                "give the model a row for it, or use the tokenizer that belongs to it"
            )
        return text, np.array(ids, dtype=np.int32)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """The text of a response, without special tokens unless the codec shows them."""
        known = [t for t in map(int, token_ids) if t <= self.largest_id]
        return cast("str", self._tokenizer.decode(known, skip_special_tokens=self._hides_specials))

    def check_vocabulary(self) -> None:
        """Check that the model has a row for each of the tokenizer's words.

        Added tokens may lie beyond the model's rows: text models come with tokens for images, and an unused pad token.
        A prompt that holds one is refused.

        Raises:
            SourceUnreadable: the tokenizer belongs to another model; with figures.
        """
        added = self._tokenizer.get_added_vocab()
        words = [id_ for token, id_ in self._tokenizer.get_vocab().items() if token not in added]
        if words and max(words) >= self._rows:
            raise SourceUnreadable(
                f"model.path {self._directory}: the tokenizer's ids go up to {max(words)}, and the model's vocab_size "
                f"is {self._rows} (config.json): use the tokenizer that belongs to the model"
            )

    @cached_property
    def _rows(self) -> int:
        """Number of rows of the model's embedding; without limit where config.json does not say."""
        rows = text_config(self._directory).get("vocab_size")
        return rows if isinstance(rows, int) else sys.maxsize

    @cached_property
    def largest_id(self) -> int:
        """The largest id that has a text."""
        return max(self._tokenizer.get_vocab().values(), default=-1)

    def _from_template(self, messages: Chat) -> tuple[str, list[int]]:
        """Render ``messages``. If the last one is the assistant's, the model's response continues it."""
        prefill = bool(messages) and messages[-1].get("role") == "assistant"
        how: dict[str, Any] = {
            **self._data.chat_template_kwargs,
            "add_generation_prompt": not prefill,
            "continue_final_message": prefill,
        }
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, **how)
        ids = self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **how)
        return cast("str", text), cast("list[int]", ids)


def _words(error: Exception) -> str:
    """What an error says; with its type, unless the template raised it by ``raise_exception``."""
    from jinja2 import TemplateError

    said = str(error)
    return said if type(error) is TemplateError and said else f"{type(error).__name__}: {said}"
