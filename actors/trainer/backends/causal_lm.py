"""Any Hugging Face causal LM, asked only for the log-probabilities of response tokens.

    input_ids[B, T] ─ decoder ─▶ hidden[B, T, H] ─ rows that predict a response token ─▶ [N, H] ─ lm_head ─▶ logits[N, V]

The rows are picked by a hook in front of the output embedding: the prompt and the padding never meet the vocabulary,
and whatever a model does to its logits afterwards (scaling, soft caps) still happens. Padding comes last, so causal
attention alone keeps it away from every token that counts, and no mask is built.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from actors.core.import_guard import hide_broken_optionals
from actors.trainer.backend import BackendSpec, MicroBatch
from actors.trainer.errors import BadMicroBatch, ModelNotLoadable


def load_model(path: Path, spec: BackendSpec) -> nn.Module:
    """The model of ``path`` in the spec's dtype, on its device, without dropout.

    Raises ModelNotLoadable when the directory is missing or no causal LM.
    """
    hide_broken_optionals()
    from transformers import AutoModelForCausalLM

    if not path.is_dir():
        raise ModelNotLoadable(f"model.path: {path} is not a directory; name a Hugging Face directory")
    dtype = getattr(torch, spec.dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelNotLoadable(f"model.path: {path} holds no causal LM that transformers can load: {error}") from error
    model.to(device=spec.device, dtype=dtype)
    model.config.use_cache = False
    model.eval()
    if spec.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        disable_dropout(model)
    return model


def disable_dropout(model: nn.Module) -> None:
    """The engines generate without dropout; log-probabilities under dropout would be those of another policy."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "activation_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


class ResponseLogits:
    """Calls a causal LM for logits at chosen positions."""

    def __init__(self, model: nn.Module, device: str) -> None:
        self.model = model
        self._device = device
        self._rows: Tensor | None = None
        head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
        head.register_forward_pre_hook(self._pick_rows)

    def _pick_rows(self, _head: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        if self._rows is None:
            return None
        hidden = args[0]
        return (hidden.reshape(-1, hidden.shape[-1]).index_select(0, self._rows)[None],)

    def __call__(self, batch: MicroBatch, predicted: np.ndarray) -> tuple[Tensor, Tensor]:
        """(logits [N, V], targets int64[N]) for the N positions where ``predicted`` bool[B, T] holds, in row order."""
        check_batch(batch, predicted)
        positions = np.flatnonzero(predicted)
        ids = torch.from_numpy(batch.input_ids.astype(np.int64)).to(self._device)
        # the hidden state at t - 1 predicts the token at t
        self._rows = torch.from_numpy(positions - 1).to(self._device)
        try:
            logits = self.model(input_ids=ids, use_cache=False).logits[0]
        finally:
            self._rows = None
        targets = torch.from_numpy(batch.input_ids.reshape(-1)[positions].astype(np.int64)).to(self._device)
        return logits, targets


def response_positions(batch: MicroBatch) -> np.ndarray:
    """bool[B, T]: where a response token stands."""
    t = np.arange(batch.input_ids.shape[1])
    return (t >= batch.prompt_lengths[:, None]) & (t < batch.lengths[:, None])


def check_batch(batch: MicroBatch, predicted: np.ndarray) -> None:
    """Raise BadMicroBatch, naming the field, when shapes differ or a position cannot be predicted."""
    shape = batch.input_ids.shape
    for name in ("behaviour_logprobs", "advantages", "loss_weight", "reference_logprobs", "stale"):
        column = getattr(batch, name)
        if column is not None and column.shape != shape:
            raise BadMicroBatch(f"{name}: shape {column.shape}, expected {shape} as input_ids")
    if predicted[:, 0].any():
        raise BadMicroBatch("loss_weight: a token at position 0 has nothing to be predicted from, expected 0 there")
    if (predicted & ~response_positions(batch)).any():
        raise BadMicroBatch("loss_weight: not 0 on a prompt or padding position")
