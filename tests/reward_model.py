"""A reward model of a few thousand weights, saved as transformers saves one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.chat_tokenizer import CHATML, VOCABULARY, save_tokenizer

TAKES_TOKENS = 128


def save_reward_model(
    path: Path, template: str | None = CHATML, labels: int = 1, head: bool = True, **tokens: str | None
) -> str:
    """A Llama of a few thousand weights that classifies, or without ``head`` one that goes on writing."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(7)
    made: Any = LlamaConfig
    config = made(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=TAKES_TOKENS, num_labels=labels, initializer_range=0.5,
    )  # fmt: skip
    (LlamaForSequenceClassification if head else LlamaForCausalLM)(config).save_pretrained(path)
    save_tokenizer(path, template, **tokens)
    return str(path)
