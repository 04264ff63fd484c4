"""A small transformer encoder that predicts how long the response to a prompt will be.

    token ids (the last PROMPT_TOKENS) ─▶ BERT of 2 layers, made on the spot ─▶ mean over tokens ─▶ log of the length

It reads the policy's own token ids, so it needs no tokenizer. Fitted by regression of the log length: the order is what
counts, and the log keeps a few very long responses from being all that it learns. Lengths are standardised over the
pairs that it is fitted on, so that a drift of all lengths together moves two numbers and not the network.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from actors.ranker.model import LengthPair

PROMPT_TOKENS: Final = 256
"""Of a longer prompt its end is read: the question usually comes last."""
_VOCABULARY_MAX: Final = 32_768
"""Ids of larger vocabularies are folded: the table is most of the model."""
_HIDDEN, _LAYERS, _HEADS = 64, 2, 4
_BATCH: Final = 32
_STEPS: Final = 10
"""Gradient steps of one slice."""
_LEARNING_RATE: Final = 1e-3
_SCORE_BATCH: Final = 128

RunBlocking = Callable[..., Awaitable[Any]]


class EncoderLengthModel:
    """Implements ``LengthModel``. ``run_blocking`` runs a function on a thread, one at a time."""

    def __init__(self, model_path: Path, seed: int, run_blocking: RunBlocking, *, threads: int = 1) -> None:
        self._model_path = model_path
        self._seed = seed
        self._run = run_blocking
        self._threads = threads
        self._draw = random.Random(seed)
        self._mean, self._deviation = 0.0, 1.0

    async def start(self) -> None:
        await self._run(self._make)

    async def score(self, prompts: Sequence[np.ndarray]) -> np.ndarray:
        return await self._run(self._score, prompts)

    async def fit(self, pairs: Sequence[LengthPair]) -> float:
        return await self._run(self._fit, pairs)

    async def close(self) -> None:
        """Nothing to give back."""

    # ------------------------------------------------------------ on the thread

    def _make(self) -> None:
        from transformers import AutoConfig, BertConfig, BertModel

        torch.set_num_threads(self._threads)
        config: Any = AutoConfig.from_pretrained(self._model_path, local_files_only=True)
        size = getattr(config, "vocab_size", None) or config.get_text_config().vocab_size
        self._vocabulary = min(int(size), _VOCABULARY_MAX)
        torch.manual_seed(self._seed)
        encoder_config = BertConfig(
            vocab_size=self._vocabulary + 1,
            hidden_size=_HIDDEN,
            num_hidden_layers=_LAYERS,
            num_attention_heads=_HEADS,
            intermediate_size=2 * _HIDDEN,
            max_position_embeddings=PROMPT_TOKENS,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self._encoder: Any = BertModel(encoder_config, add_pooling_layer=False)
        self._head = torch.nn.Linear(_HIDDEN, 1)
        parameters = [*self._encoder.parameters(), *self._head.parameters()]
        self._optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE)

    def _forward(self, prompts: Sequence[np.ndarray]) -> torch.Tensor:
        """float32[p] standardised log lengths."""
        tails = [ids[-PROMPT_TOKENS:] for ids in prompts]
        width = max(1, *(len(ids) for ids in tails))
        tokens = np.full((len(tails), width), self._vocabulary, np.int64)
        mask = np.zeros((len(tails), width), np.int64)
        for row, ids in enumerate(tails):
            tokens[row, : len(ids)] = ids % self._vocabulary
            mask[row, : len(ids)] = 1
        present = torch.from_numpy(mask)
        states = self._encoder(input_ids=torch.from_numpy(tokens), attention_mask=present).last_hidden_state
        weight = present.unsqueeze(-1).to(states.dtype)
        mean = (states * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=1.0)
        return self._head(mean).squeeze(-1)

    def _score(self, prompts: Sequence[np.ndarray]) -> np.ndarray:
        parts: list[np.ndarray] = []
        with torch.inference_mode():
            for first in range(0, len(prompts), _SCORE_BATCH):
                logs = self._forward(prompts[first : first + _SCORE_BATCH])
                parts.append(np.exp(logs.double().numpy() * self._deviation + self._mean))
        return np.concatenate(parts) if parts else np.empty(0)

    def _fit(self, pairs: Sequence[LengthPair]) -> float:
        logs = np.log(np.maximum([pair.response_tokens for pair in pairs], 1.0))
        self._mean, self._deviation = float(logs.mean()), max(float(logs.std()), 1e-3)
        targets = torch.tensor((logs - self._mean) / self._deviation, dtype=torch.float32)
        total = 0.0
        for _ in range(_STEPS):
            chosen = [self._draw.randrange(len(pairs)) for _ in range(min(_BATCH, len(pairs)))]
            predicted = self._forward([pairs[i].prompt_ids for i in chosen])
            loss = torch.nn.functional.smooth_l1_loss(predicted, targets[chosen])
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            total += float(loss.detach())
        return total / _STEPS
