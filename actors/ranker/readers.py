"""The models that read prompts for the ranker: a small untrained encoder, or a Hugging Face model that the user names.

    made    the policy's own token ids ─▶ BERT of 2 layers, random                       needs no tokenizer
    given   ids ─▶ text ─▶ the model's own tokenizer ─▶ encoder or language model        knows language already
            (ids as they are where both have the same vocabulary)

Either way the last ``PROMPT_TOKENS`` of a prompt are read, since the question usually comes last, and the states of the
last layer are what the head (``encoder.py``) sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch

from actors.models.whole_model import WeightsNotWhole, load_whole
from actors.ranker.errors import RankerModelUnreadable

PROMPT_TOKENS: Final = 256
_VOCABULARY_MAX: Final = 32_768
"""Largest embedding table: ids beyond it are taken modulo, since the table is most of a small model's weights."""
_HIDDEN, _LAYERS, _HEADS = 64, 2, 4


class Reader(Protocol):
    """Turns prompts into hidden states."""

    module: torch.nn.Module
    hidden: int
    learning_rate: float
    """Learning rate of AdamW, for all of ``module``."""

    def tokens(self, prompts: Sequence[np.ndarray]) -> list[list[int]]:
        """The model's own token ids for each of ``prompts`` (int32[…]), at most the last ``PROMPT_TOKENS``."""
        ...

    def states(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Hidden states float32[p, t, hidden] of int64[p, t] ids; where ``mask`` is 0 there is no token."""
        ...


class MadeReader:
    """Reads with two layers of BERT over the policy's token ids, drawn from ``seed``."""

    learning_rate = 1e-3
    hidden = _HIDDEN

    def __init__(self, policy_path: Path, seed: int) -> None:
        from transformers import AutoConfig, BertConfig, BertModel

        config: Any = AutoConfig.from_pretrained(policy_path, local_files_only=True)
        size = getattr(config, "vocab_size", None) or config.get_text_config().vocab_size
        self._vocabulary = min(int(size), _VOCABULARY_MAX)
        torch.manual_seed(seed)
        encoder_config = BertConfig(
            vocab_size=self._vocabulary,
            hidden_size=_HIDDEN,
            num_hidden_layers=_LAYERS,
            num_attention_heads=_HEADS,
            intermediate_size=2 * _HIDDEN,
            max_position_embeddings=PROMPT_TOKENS,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            pad_token_id=None,
        )
        self.module: torch.nn.Module = BertModel(encoder_config, add_pooling_layer=False)

    def tokens(self, prompts: Sequence[np.ndarray]) -> list[list[int]]:
        return [(ids[-PROMPT_TOKENS:] % self._vocabulary).tolist() for ids in prompts]

    def states(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.module(input_ids=ids, attention_mask=mask).last_hidden_state


class GivenReader:
    """Reads with the model in the directory ``path``, fine-tuned as a whole.

    Raises:
        RankerModelUnreadable: the model or one of the two tokenizers cannot be loaded.
    """

    learning_rate = 2e-5

    def __init__(self, path: Path, policy_path: Path) -> None:
        from transformers import AutoModel, AutoTokenizer

        try:
            module: Any = load_whole(AutoModel, path, new_head=True, dtype=torch.float32)
            self._own: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
            self._policys: Any = AutoTokenizer.from_pretrained(policy_path, local_files_only=True)
        except (OSError, ValueError, KeyError, WeightsNotWhole) as error:
            raise RankerModelUnreadable(path, error) from error
        self.module = module
        self.hidden = int(module.config.get_text_config().hidden_size)
        positions = getattr(module.config.get_text_config(), "max_position_embeddings", None) or PROMPT_TOKENS
        self._most = min(PROMPT_TOKENS, int(positions))
        self._same = self._own.get_vocab() == self._policys.get_vocab()
        self._own.truncation_side = "left"

    def tokens(self, prompts: Sequence[np.ndarray]) -> list[list[int]]:
        if self._same:
            return [ids[-self._most :].tolist() for ids in prompts]
        texts = self._policys.batch_decode([ids.tolist() for ids in prompts], skip_special_tokens=True)
        return self._own(texts, truncation=True, max_length=self._most)["input_ids"] if texts else []

    def states(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.module(input_ids=ids, attention_mask=mask).last_hidden_state
