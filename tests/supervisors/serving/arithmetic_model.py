"""A tiny model that was taught a little addition: half of the time it rambles, else it answers near the sum."""

from __future__ import annotations

import math
from pathlib import Path

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
_NUMBERS = [f" {number}" for number in range(201)]
_WORDS = ["User", "Assistant", ":", " What", " is", " +", "?", "\n\n"]
_WIDTH = 64
_END, _RAMBLING = "\n\nUser:", " is is is is"
"""Of an answer, the second as long as a number with its end."""
_SHOWN = "User: What is 4 + 5?\n\nAssistant: 9\n\n"


def make_arithmetic_model(path: Path, *, steps: int, batch: int = 128) -> Path:
    """Write a Qwen3 of two layers, and a tokenizer of whole numbers, to ``path``; return ``path``.

    Numbers that are close have embeddings that are close, so that a minute of training gets somewhere.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = _tokenizer()
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=len(tokenizer), hidden_size=_WIDTH, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, head_dim=16, max_position_embeddings=128,
        tie_word_embeddings=False, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    angles = torch.arange(len(_NUMBERS))[:, None] * torch.arange(1, _WIDTH // 2 + 1) * math.pi / 256
    waves = 0.1 * torch.cat([angles.cos(), angles.sin()], dim=-1)
    first = tokenizer.convert_tokens_to_ids(_NUMBERS[0])
    with torch.no_grad():
        for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
            weight[first : first + len(_NUMBERS)] = waves
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    answer_tokens = len(tokenizer.encode(_RAMBLING))
    for _ in range(steps):
        answers = [
            (x, y, f" {x + y}{_END}" if number % 2 else _RAMBLING)
            for number, (x, y) in enumerate(torch.randint(0, 101, (batch, 2)).tolist())
        ]
        texts = [f"{_SHOWN}User: What is {x} + {y}?\n\nAssistant:{answer}" for x, y, answer in answers]
        tokens = torch.tensor([tokenizer.encode(text) for text in texts])
        logits = model(input_ids=tokens).logits[:, -answer_tokens - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, -answer_tokens:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(path, safe_serialization=True)
    tokenizer.save_pretrained(path)
    return path


def _tokenizer():
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *_WORDS, *_NUMBERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\w+|\n\n| ?[^\w\s]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, unk_token=UNKNOWN)
