"""The critic: the backbone of a language model with a value head, which gives one number per token.

    causal LM        backbone, and a small head drawn from the seed
    reward model     backbone, and the head of its one label

    MicroBatch ─ layout ─▶ backbone ─▶ hidden[R, L, H] ─ rows that predict ─▶ [U, H] ─ value head ─▶ values[U]

The value of a token is read where the policy predicts it: the return expected before the token is drawn. Layouts,
packing and replicas are the policy's (``causal_lm``, ``replicas``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from actors.host.import_guard import hide_broken_optionals
from actors.models.model_errors import brief, passes
from actors.models.whole_model import load_whole
from actors.trainer.backend import NO_STATS, BackendSpec, CriticSpec, LossSpec, MicroBatch, MicroBatchStats
from actors.trainer.backends.torch.attention.context import ContextRanks
from actors.trainer.backends.torch.causal_lm import ResponseLogits, prepared, response_positions
from actors.trainer.backends.torch.device_sums import DeviceSums, on_device
from actors.trainer.backends.torch.flat import GradientSums
from actors.trainer.errors import BadMicroBatch, ModelNotLoadable
from actors.trainer.learning.losses import value_losses
from configs.checks.critic_checks import is_classifier, why_no_critic
from configs.model_files import read_model_file

_USUAL_SPREAD: Final = 0.02
"""Standard deviation of a new head where the model names none, as transformers draws that of a classifier. A head of
zeros would let no gradient through to the backbone, which would learn nothing for a long time."""


class ValueHead(nn.Module):
    """Turns hidden states into values, in float32. Until it is ``open`` it passes hidden states on, for the probe."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)  # [1, H]
        self.open = False

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden.float(), self.weight.float()) if self.open else hidden


class Values(NamedTuple):
    """Holds what ``ResponseLogits`` reads of a causal LM's output. Sharding finds the tensor since this is a tuple."""

    logits: Tensor


class ValueModel(nn.Module):
    """Looks to ``ResponseLogits`` like a causal LM whose vocabulary is one value."""

    def __init__(self, backbone: nn.Module, head: Tensor) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = ValueHead(head)
        self.config: Any = backbone.config

    def forward(self, **inputs: Any) -> Values:
        return Values(logits=self.head(self.backbone(**inputs).last_hidden_state))

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.get_input_embeddings()  # type: ignore[operator]

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def load_critic(spec: BackendSpec, critic: CriticSpec) -> nn.Module:
    """The critic of ``critic.model_path`` in the spec's dtype, on its device, in eval mode.

    Raises:
        ModelNotLoadable: there is no such model, it has more than one value, or its tokens are not the policy's.
    """
    path = critic.model_path
    if path != spec.model_path and (problem := why_no_critic(path, spec.model_path)):
        raise ModelNotLoadable(f"critic.path: {'. '.join(problem)}")
    hide_broken_optionals()
    try:
        model = _scorer(path, spec) if is_classifier(read_model_file(path, "config.json")) else _writer(path, spec)
    except ModelNotLoadable:
        raise
    except Exception as error:
        if passes(error):
            raise
        raise ModelNotLoadable(f"critic.path: {path} cannot be loaded as a critic: {brief(error)}") from error
    return prepared(model, spec)


def _writer(path: Path, spec: BackendSpec) -> ValueModel:
    from transformers import AutoModelForCausalLM

    model: Any = load_whole(AutoModelForCausalLM, path, new_head=True, dtype=getattr(torch, spec.dtype))
    if model.base_model is model:
        raise ModelNotLoadable(f"critic.path: {type(model).__name__} has no backbone apart from its head")
    spread = getattr(model.config.get_text_config(), "initializer_range", _USUAL_SPREAD)
    draw = torch.Generator().manual_seed(spec.seed)
    head = spread * torch.randn(1, model.get_output_embeddings().weight.shape[1], generator=draw)
    return ValueModel(model.base_model, head)


def _scorer(path: Path, spec: BackendSpec) -> ValueModel:
    from transformers import AutoModelForSequenceClassification

    model: Any = load_whole(AutoModelForSequenceClassification, path, dtype=getattr(torch, spec.dtype))
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ModelNotLoadable(
            f"critic.path: {type(model).__name__} has no head named score that reads the last token, so it is "
            "no critic of single tokens; name a reward model that was made from a causal language model"
        )
    return ValueModel(model.base_model, head.weight.detach().clone())


def judgement(batch: MicroBatch) -> tuple[np.ndarray, np.ndarray]:
    """The critic's values before the step, and the returns that it is to predict.

    Raises:
        BadMicroBatch: the batch lacks either.
    """
    if batch.old_values is None or batch.returns is None:
        raise BadMicroBatch("old_values, returns: missing, expected float32[B, T] of a job with a critic")
    return batch.old_values, batch.returns


class CriticReplica:
    """Holds one thread's critic. Without ``sums`` gradients add up in the parameters' ``grad``."""

    def __init__(
        self, model: nn.Module, device: str, sums: GradientSums | None = None, ranks: ContextRanks | None = None
    ) -> None:
        self._device = device
        self.logits = ResponseLogits(model, device, ranks=ranks, has_vocabulary=False)
        model.head.open = True  # type: ignore[union-attr]
        self._sums = sums
        self._stats = DeviceSums()

    def score(self, batch: MicroBatch, temperature: float) -> np.ndarray:
        """Values float32[B, T]; ``temperature`` matters to policies only."""
        where = response_positions(batch)
        result = np.zeros(batch.input_ids.shape, dtype=np.float32)
        with torch.no_grad():
            result[where] = self._values(batch, where).cpu().numpy()
        return result

    def accumulate(self, batch: MicroBatch, loss: LossSpec, *, learn: bool = True) -> MicroBatchStats:
        """Add the gradients of the value loss; its statistics are the device's alone."""
        old_values, wanted = judgement(batch)
        where = batch.loss_weight != 0
        values = self._values(batch, where)
        weight, old, returns = (self._at(c, where) for c in (batch.loss_weight, old_values, wanted))
        losses, clipped = value_losses(values, old, returns, loss.value_clip)
        total = torch.dot(losses, weight)
        if learn:
            total.backward()  # type: ignore[no-untyped-call]
            if self._sums is not None:
                self._sums.collect()
        self._stats.add(value_loss_sum=total, value_clipped_sum=clipped.sum())
        return NO_STATS

    def taken_stats(self) -> MicroBatchStats:
        return self._stats.taken()

    def _values(self, batch: MicroBatch, where: np.ndarray) -> Tensor:
        """Values float32[N] of the tokens at ``where``, by ``index_select``, whose gradient adds up in one order."""
        predicted = self.logits(batch, where)
        return predicted.of_all(predicted.logits[:, 0].index_select(0, predicted.rows))

    def _at(self, column: np.ndarray, where: np.ndarray) -> Tensor:
        return on_device(column[where], self._device)
