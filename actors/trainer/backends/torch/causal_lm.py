"""Any Hugging Face causal LM, asked only for the log-probabilities of response tokens.

    MicroBatch ─ layout ─▶ ids[R, L] ─ decoder ─▶ hidden[R, L, H] ─ rows that predict ─▶ [U, H] ─ head ─▶ logits[U, V]

The rows are picked by a hook in front of the output embedding: the prompt and the padding never meet the vocabulary,
and whatever a model does to its logits afterwards (scaling, soft caps) still happens. In a padded layout padding comes
last, so causal attention alone keeps it away from every token that counts, and no mask is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from actors.host.import_guard import hide_broken_optionals
from actors.host.model_errors import brief, passes
from actors.trainer.backend import BackendSpec, MicroBatch
from actors.trainer.backends.torch.fast_linear import replace_linears
from actors.trainer.backends.torch.packing import Layout, choose, packed, padded, plan_blocks
from actors.trainer.backends.torch.recompute import recompute_layers
from actors.trainer.backends.torch.rms_norm import replace_rms_norms
from actors.trainer.errors import BadMicroBatch, ModelNotLoadable
from actors.trainer.token_logprobs import token_logprobs

_COLUMNS: Final = (
    *("behaviour_logprobs", "advantages", "loss_weight", "reference_logprobs", "stale"),
    *("old_logprobs", "old_values", "returns"),
)
"""Fields of a micro-batch with a number for each position, or None."""


def load_model(path: Path, spec: BackendSpec) -> nn.Module:
    """The model of ``path`` in the spec's dtype, on its device, in eval mode.

    Raises ModelNotLoadable when the directory is missing or no causal LM.
    """
    hide_broken_optionals()
    from transformers import AutoModelForCausalLM

    if not path.is_dir():
        raise ModelNotLoadable(f"model.path: {path} is not a directory; name a Hugging Face directory")
    dtype = getattr(torch, spec.dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    except Exception as error:
        if passes(error):
            raise
        raise ModelNotLoadable(
            f"model.path: {path} holds no causal LM that transformers can load: {brief(error)}"
        ) from error
    return prepared(model, spec)


def prepared(model: nn.Module, spec: BackendSpec) -> nn.Module:
    """A model that was loaded, as it is computed with: on its device, in eval mode, with our faster parts."""
    model.to(spec.device)
    for parameter in model.parameters():  # not the buffers: rotary frequencies in bfloat16 would be other positions
        parameter.data = parameter.data.to(getattr(torch, spec.dtype))
    replace_rms_norms(model)
    replace_linears(model)
    model.eval()  # and so it stays: whatever training mode adds would make it another policy than the engine's
    if spec.gradient_checkpointing:
        recompute_layers(model)
    return model


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedLogits:
    """Holds what the log-probabilities of N tokens are computed from. Siblings that said the same share a row."""

    logits: Tensor  # [U, V]
    rows: Tensor  # int64[N], the row of ``logits`` that predicts each token
    targets: Tensor  # int64[N]

    def logprobs(self, temperature: float, *, learns_entropy: bool = False) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropies), float32[N]."""
        return token_logprobs(self.logits, self.targets, temperature, self.rows, learns_entropy=learns_entropy)


class ResponseLogits:
    """Calls a causal LM for logits at chosen positions. ``may_pack``: it was seen to obey a packed row's mask."""

    def __init__(self, model: nn.Module, device: str) -> None:
        self.model = model
        self.may_pack = False
        self._device = device
        self._rows: Tensor | None = None
        self._computed = torch.float32
        """What hidden states are in, which sharded parameters need not be."""
        self._hidden: int = model.get_input_embeddings().weight.shape[1]  # type: ignore[operator]
        head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
        head.register_forward_pre_hook(self._pick_rows)
        self.may_pack = self._obeys_masks()

    def _pick_rows(self, _head: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        if self._rows is None:
            return None
        hidden = args[0]
        self._computed = hidden.dtype
        return (hidden.reshape(-1, hidden.shape[-1]).index_select(0, self._rows)[None],)

    def __call__(self, batch: MicroBatch, predicted: np.ndarray) -> PredictedLogits:
        """For the N positions where ``predicted`` bool[B, T] holds, in row order."""
        check_batch(batch, predicted)
        layout = choose(batch, predicted, hidden=self._hidden, may_pack=self.may_pack)
        targets = torch.from_numpy(batch.input_ids[predicted].astype(np.int64)).to(self._device)
        rows = torch.from_numpy(layout.row_of).to(self._device)
        return PredictedLogits(logits=self.forward(layout), rows=rows, targets=targets)

    def forward(self, layout: Layout) -> Tensor:
        """Logits [U, V] of the layout's predicting positions."""
        extra: dict[str, Tensor] = {}
        if layout.mask is not None and layout.position_ids is not None:
            extra["attention_mask"] = torch.from_numpy(layout.mask).to(self._device)
            extra["position_ids"] = torch.from_numpy(layout.position_ids).to(self._device)
        self._rows = torch.from_numpy(layout.rows).to(self._device)
        try:
            ids = torch.from_numpy(layout.input_ids).to(self._device)
            return self.model(input_ids=ids, use_cache=False, **extra).logits[0]
        finally:
            self._rows = None

    def _obeys_masks(self) -> bool:
        """Whether packed rows give the padded rows' logits on an example. Not so with ALiBi or recurrence.

        Windowed attention ignores its window under a mask of ours, so such models are never packed.
        """
        config: Any = self.model.config
        if getattr(config, "_attn_implementation", None) != "sdpa" or getattr(config, "sliding_window", None):
            return False
        example, predicted = probe_batch(int(config.vocab_size))
        with torch.no_grad():
            expected = self._per_token(padded(example, predicted))
            try:
                actual = self._per_token(packed(example, predicted, [tuple(plan_blocks(example))]))
            except (TypeError, ValueError, RuntimeError, IndexError):
                return False
        # the spread of an honest model's logits is about 1; half precision rounds in the second digit
        tolerance = 1e-3 if self._computed == torch.float32 else 0.1
        scale = max(1.0, expected.abs().max().item())
        return bool((expected - actual).abs().max().item() < tolerance * scale)

    def _per_token(self, layout: Layout) -> Tensor:
        return self.forward(layout).float()[torch.from_numpy(layout.row_of).to(self._device)]


def probe_batch(vocabulary: int) -> tuple[MicroBatch, np.ndarray]:
    """Three siblings of one prompt, two of which begin alike, and one of another prompt.

    Enough to see leaks between responses and between branches of one, and wrong positions.
    """
    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocabulary, (4, 12)).astype(np.int32)
    ids[1:3, :5] = ids[0, :5]
    ids[2, 5:8] = ids[0, 5:8]
    lengths, prompts = np.array([12, 9, 11, 12], dtype=np.int32), np.array([5, 5, 5, 3], dtype=np.int32)
    zeros = np.zeros(ids.shape, dtype=np.float32)
    batch = MicroBatch(
        input_ids=ids,
        lengths=lengths,
        prompt_lengths=prompts,
        behaviour_logprobs=zeros,
        advantages=zeros,
        loss_weight=zeros,
    )
    return batch, response_positions(batch)


def response_positions(batch: MicroBatch) -> np.ndarray:
    """bool[B, T]: where a response token stands."""
    t = np.arange(batch.input_ids.shape[1])
    return (t >= batch.prompt_lengths[:, None]) & (t < batch.lengths[:, None])


def check_batch(batch: MicroBatch, predicted: np.ndarray) -> None:
    """Raise BadMicroBatch, naming the field, when shapes differ or a position cannot be predicted."""
    shape = batch.input_ids.shape
    for name in _COLUMNS:
        column = getattr(batch, name)
        if column is not None and column.shape != shape:
            raise BadMicroBatch(f"{name}: shape {column.shape}, expected {shape} as input_ids")
    if predicted[:, 0].any():
        raise BadMicroBatch("loss_weight: a token at position 0 has nothing to be predicted from, expected 0 there")
    if (predicted & ~response_positions(batch)).any():
        raise BadMicroBatch("loss_weight: not 0 on a prompt or padding position")
