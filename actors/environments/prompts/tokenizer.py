"""Text to token ids and back, with the tokenizer file of an HF directory alone: no torch, no model code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from tokenizers import Tokenizer

from actors.environments.errors import SourceUnreadable
from configs.schema import DataConfig


class TextCodec:
    """Encodes prompts as the job file says and decodes responses.

    Raises:
        SourceUnreadable: the directory has no ``tokenizer.json``, or a chat template is needed and missing.
    """

    def __init__(self, model_path: Path, data: DataConfig) -> None:
        file = model_path / "tokenizer.json"
        if not file.is_file():
            raise SourceUnreadable(
                f"model.path {model_path}: no tokenizer.json; save the model's fast tokenizer beside it"
            )
        self._tokenizer: Any = Tokenizer.from_file(str(file))
        self._data = data
        self._template_source: str | None = _chat_template(model_path)
        self._specials = _special_tokens(model_path)

    def encode(self, prompt: str | list[dict[str, str]]) -> tuple[str, np.ndarray]:
        """The text that the model sees and its token ids, int32[n]."""
        if isinstance(prompt, list) or self._data.chat:
            text = self._render(prompt)
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids  # the template wrote the special tokens
        else:
            text = self._data.template.replace("{prompt}", prompt)
            ids = self._tokenizer.encode(text, add_special_tokens=True).ids
        return text, np.array(ids, dtype=np.int32)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        return cast("str", self._tokenizer.decode([int(t) for t in token_ids], skip_special_tokens=True))

    def _render(self, prompt: str | list[dict[str, str]]) -> str:
        text = self._data.template
        messages = (
            prompt if isinstance(prompt, list) else [{"role": "user", "content": text.replace("{prompt}", prompt)}]
        )
        if self._data.system_prompt:
            messages = [{"role": "system", "content": self._data.system_prompt}, *messages]
        return cast("str", self._template.render(messages=messages, add_generation_prompt=True, **self._specials))

    @cached_property
    def _template(self) -> Any:
        """Compiled once, for that takes 10 ms; and only if needed, for a codec that decodes needs none."""
        if self._template_source is None:
            raise SourceUnreadable(
                "data.chat is set, but the model's tokenizer has no chat template; unset it or add one"
            )
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_template_error  # pyright: ignore[reportArgumentType]
        return environment.from_string(self._template_source)


def _raise_template_error(message: str) -> None:
    raise SourceUnreadable(f"the model's chat template refused a prompt: {message}")


def _read_config(model_path: Path) -> dict[str, Any]:
    file = model_path / "tokenizer_config.json"
    return cast("dict[str, Any]", json.loads(file.read_text())) if file.is_file() else {}


def _chat_template(model_path: Path) -> str | None:
    file = model_path / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    template = _read_config(model_path).get("chat_template")
    return template if isinstance(template, str) else None


def _special_tokens(model_path: Path) -> dict[str, str]:
    specials: dict[str, str] = {}
    for key, value in _read_config(model_path).items():
        if key.endswith("_token"):
            content = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                specials[key] = content
    return specials
