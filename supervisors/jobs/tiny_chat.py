"""What a tiny model for episodes is made of: a BPE tokenizer with a chat template, and games to begin with.

    rows ─▶ the environment's own ``example(row, draw)``: a conversation ─▶ texts, of which the model says some

An environment without ``example``, an agent and whoever is outside get a model that has learned nothing. The tokenizer
is a BPE, as those of real models are: a text has several spellings in its tokens, and what was sampled is one of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from actors.environments.prompts.rows import Row
from actors.environments.scoring.scorers import load_function
from configs.schema import JobConfig

Example = list[tuple[str, bool]]
"""Texts in their order, and whether the model says each; each of these is followed by the end token."""
START, END, PAD = "<|im_start|>", "<|im_end|>", "<pad>"
TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_VOCABULARY: Final = 384
"""The 256 bytes, the special tokens, and the most frequent of what the games are made of."""


def make_chat_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE that has learned its words from ``texts``."""
    core: Any = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=END, additional_special_tokens=[START]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def example_maker(job: JobConfig) -> Callable[[Row, random.Random], Example] | None:
    """Makes examples of the job's environment; None: it has none to show."""
    environment = job.environment
    if environment.kind != "python" or environment.path is None:
        return None
    made = load_function(environment.path, "environment.path")
    if not hasattr(made, "example"):
        return None

    def example(row: Row, draw: random.Random) -> Example:
        columns = {**row.extra, "prompt": row.prompt, "answer": row.answer, "index": row.index}
        return as_texts(made(**environment.options).example(columns, draw))

    return example


def as_texts(messages: list[dict[str, str]]) -> Example:
    """A conversation as TEMPLATE renders it, cut where the model begins and ends to speak."""
    texts: Example = []
    between = ""
    for message in messages:
        if message["role"] == "assistant":
            texts += [(f"{between}{START}assistant\n", False), (message["content"], True)]
            between = "\n"
        else:
            between += f"{START}{message['role']}\n{message['content']}{END}\n"
    return texts
