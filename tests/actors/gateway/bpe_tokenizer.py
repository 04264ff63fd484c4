"""A byte-level BPE tokenizer of 2,000 entries with chat templates like those in use.

A character tokenizer hides what goes wrong when a turn is rendered again: there a text has one tokenization. Here
nearly every text that a random model says has several.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

END, START, TEXT_END = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
VOCABULARY = 2000

CHATML = (
    "{%- if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>{{ '\\n' }}{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>{{ '\\n' }}"
    "{%- else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}{{ '\\n' }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>{{ '\\n' }}"
    "{%- endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
)
"""Keeps history: what was said stays."""

THINKING = (
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>{{ '\\n' }}"
    "{%- elif m.role != 'assistant' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ '\\n' }}"
    "{%- else %}{% set content = m.content %}{% set thought = m.reasoning_content or '' %}"
    "{%- if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "<|im_start|>assistant\n"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '\\n' }}<think>\n{{ thought }}\n</think>\n\n{{ content }}"
    "{%- else %}{{ '\\n' }}{{ content }}{% endif %}"
    "{%- for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>{{ '\\n' }}"
    "{%- endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
)
"""As Qwen3's: thoughts before the last question of a user are dropped."""


@functools.cache
def _core() -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    core: Any = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    noise = random.Random(0)
    syllables = ["ka", "lo", "mi", "ster", "ing", "the", "un", "er", "ta", "pro", "json", "en", "der", "cat", "s", "o"]
    words = ["".join(noise.choices(syllables, k=noise.randint(1, 4))) for _ in range(3000)]
    lines = [" ".join(noise.choices(words, k=12)) + noise.choice([".", "?", "!\n"]) for _ in range(800)]
    trainer: Any = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[TEXT_END, START, END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    core.train_from_iterator(lines, trainer)
    core.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    return core.to_str()


def make_tokenizer(template: str | None = CHATML) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_core()),
        eos_token=END,
        pad_token=TEXT_END,
        additional_special_tokens=[START],
    )
    tokenizer.chat_template = template
    return tokenizer


def save_model(directory: Path, template: str | None = CHATML, positions: int = 4096) -> Path:
    """A directory with all that the gateway reads of a model."""
    import json

    directory.mkdir(parents=True, exist_ok=True)
    make_tokenizer(template).save_pretrained(directory)
    config = {"vocab_size": VOCABULARY + len(MARKERS), "max_position_embeddings": positions, "eos_token_id": None}
    (directory / "config.json").write_text(json.dumps(config))
    return directory
