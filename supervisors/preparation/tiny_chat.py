"""The parts of a tiny model for episodes: a BPE tokenizer with a chat template, and example games to learn from.

    rows ─▶ the environment's own ``example(row, draw)``: a conversation ─▶ texts, some of which the model says

For an environment without ``example``, for an agent, and for agents outside, the model has learned nothing. The
tokenizer is a BPE, like those of real models, so that a text can be spelt with several sequences of tokens, of which
the model has sampled one.
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
"""Texts in order, each with whether the model says it; a text of the model is followed by the end token."""
START, END, PAD = "<|im_start|>", "<|im_end|>", "<pad>"
TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_VOCABULARY: Final = 384
"""Size of the vocabulary: the 256 bytes, the special tokens, and the most frequent strings of the games."""


def make_chat_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that was trained on ``texts``."""
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
    """A function that makes examples with the job's environment; None if that has no ``example``."""
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
    """A conversation as TEMPLATE renders it, split where a message of the model begins and ends."""
    texts: Example = []
    between = ""
    for message in messages:
        if message["role"] == "assistant":
            texts += [(f"{between}{START}assistant\n", False), (message["content"], True)]
            between = "\n"
        else:
            between += f"{START}{message['role']}\n{message['content']}{END}\n"
    return texts
