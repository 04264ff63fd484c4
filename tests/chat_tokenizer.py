"""A tokenizer of single characters with a chat template, saved as transformers saves one: tests of text stand on it."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

PAD, END, TURN, TURN_END = "<pad>", "<end>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, END, "<unk>", "<bos>", TURN, TURN_END)
CHARACTERS = sorted(string.ascii_letters + string.digits + string.punctuation + " \n")
VOCABULARY = len(SPECIAL) + len(CHARACTERS)
"""Ids of the tokenizer are 0 … ``VOCABULARY`` - 1; the special tokens come first."""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def save_tokenizer(directory: Path, template: str | dict[str, str] | None = CHATML, **settings: Any) -> Any:
    """Write the tokenizer to ``directory`` and return it. Several named templates are given as a dict."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    core: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokens = {"pad_token": PAD, "eos_token": END, "unk_token": "<unk>", "bos_token": "<bos>"} | settings
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, additional_special_tokens=[TURN, TURN_END], **tokens)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return tokenizer
