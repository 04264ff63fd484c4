"""Tiny Hugging Face checkpoints, made on the spot: config, safetensors and a character-level tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def tiny_vocabulary(vocab: int) -> dict[str, int]:
    """Token text → id: three specials, printable ASCII and newline, then fillers up to ``vocab``."""
    tokens = [PAD, EOS, UNKNOWN, *_CHARACTERS][:vocab]
    tokens += [f"<extra_{n}>" for n in range(vocab - len(tokens))]
    return {token: index for index, token in enumerate(tokens)}


def make_tiny_checkpoint(
    path: Path,
    *,
    seed: int = 0,
    vocab: int = 100,
    tied: bool = True,
    architecture: str = "qwen3",
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    max_position: int = 512,
    dtype: str = "float32",
) -> Path:
    """Write a random ``architecture`` (qwen3, qwen2, llama, mistral, gpt2, gpt_neox, opt) to ``path``; return ``path``.

    Weights are drawn five times wider than usual, so that greedy choices have clear margins.
    """
    import torch

    path.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    model = _model(architecture, vocab, tied, hidden, layers, heads, kv_heads, max_position)
    model = model.to(getattr(torch, dtype)).eval()
    model.save_pretrained(path, safe_serialization=True)
    save_tokenizer(path, vocab)
    return path


def _model(
    architecture: str, vocab: int, tied: bool, hidden: int, layers: int, heads: int, kv_heads: int, positions: int
) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    ids: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "tie_word_embeddings": tied}
    wide = {"initializer_range": 0.1}
    if architecture == "gpt2":
        sizes: dict[str, Any] = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": positions}
    elif architecture == "opt":
        sizes = {
            "hidden_size": hidden,
            "ffn_dim": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
        }
        sizes |= {"max_position_embeddings": positions, "word_embed_proj_dim": hidden}
        wide = {"init_std": 0.1}
    else:
        sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
        sizes |= {"intermediate_size": 2 * hidden, "max_position_embeddings": positions}
        if architecture != "gpt_neox":
            sizes |= {"num_key_value_heads": kv_heads, "head_dim": hidden // heads}
    config = AutoConfig.for_model(architecture, vocab_size=vocab, **sizes, **ids, **wide)
    return AutoModelForCausalLM.from_config(config)


def save_tokenizer(path: Path, vocab: int = 100) -> None:
    """Write a tokenizer with one token a character to ``path``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(tiny_vocabulary(vocab), unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, unk_token=UNKNOWN, model_max_length=100_000
    ).save_pretrained(path)
