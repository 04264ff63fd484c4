"""The head of a causal LM, asked for log-probabilities and entropies, so that no logits of all tokens are ever there.

    model.forward (ours) ─ its own ─▶ layers ─▶ hidden ─▶ head.forward (ours) ─▶ TokenLogprobs(hidden, weight) ─┐
           ▲                            scale, cap ◀── one 0 in place of logits                                 │
           └────────────────────────── [2, N]: log-probabilities, entropies ────────────────────────────────────┘

What a family does to its logits (scaling, soft caps) happens to that 0, and the same, read from the model's
configuration, to each block of logits. The result leaves through the model's forward, as that of any model: where it is
sharded, that is what gathers its weights again for the backward pass.

Invariants
- At the start an example goes both ways, with hidden states so large that a soft cap shows. Where they differ, where
  the model wants something else of its head, and where the head is more than a matrix with an adapter or without,
  logits are made whole, and people are told so.
- Between questions the model is as it was: its head gives logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import structlog
import torch
from torch import Tensor, nn

from actors.trainer.backends.torch.flat import GradientSums
from actors.trainer.backends.torch.layers.adapted_linear import factors_of
from actors.trainer.learning.token_logprobs import Reading, TokenLogprobs, token_logprobs, used_temperature

log = structlog.get_logger("headrace.trainer")

_LARGE: Final = 50.0
"""Largest logit of the example: a soft cap, usually of 15 to 30, has to show whatever the weights are."""
_APART_MAX: Final = {torch.float32: 1e-4}
_APART_MAX_HALF: Final = 0.05
"""Most that both ways may be apart on the example, in largest logits; half precision rounds in the third digit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Asks for N tokens: ``targets`` int64[N], and ``rows`` int64[N], the hidden state that predicts each."""

    rows: Tensor
    targets: Tensor
    temperature: float
    learns_entropy: bool = False


class _Answer(NamedTuple):
    """Looks like the output of a causal LM. Sharding finds the tensor since this is a tuple."""

    logits: Tensor  # float32[1, 2, N]


class BlockedHead:
    """Answers questions with a causal LM: by blocks where that gives the same, else from whole logits.

    ``sums``: where the gradient of the head's weight is added up; without them autograd gives it to the parameter.
    """

    def __init__(self, model: Any, sums: GradientSums | None = None) -> None:
        self._model, self._head = model, model.get_output_embeddings()
        self._own_head, self._own_model = self._head.forward, model.forward
        self._factors = factors_of(self._head)
        self._gradient_into = None if sums is None else sums.of(self._head.weight)
        self._question: Question | None = None
        self._reading = Reading()
        self._answer: Tensor | None = None
        self._enlarges = False
        self._computed = torch.float32
        """Dtype of the hidden states, which sharded parameters may not have."""
        self.by_blocks = False

    def answer(self, question: Question, logits: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropies), float32[N]. ``logits`` calls the model; whole, they are [U, V]."""
        if not self.by_blocks:
            how = {"learns_entropy": question.learns_entropy}
            return token_logprobs(logits(), question.targets, question.temperature, question.rows, **how)
        self._question = question
        try:
            logprobs, entropies = logits()
        finally:
            self._question = self._answer = None
        return logprobs, entropies if question.learns_entropy else entropies.detach()

    def try_blocks(self, example: Question, logits: Callable[[], Tensor]) -> None:
        """Answer by blocks from now on, if the example is answered as from whole logits."""
        why = _more_than_a_matrix(self._head) or self._why_apart(example, logits)
        if why:
            _tell(type(self._model).__name__, why)

    @torch.no_grad()
    def _why_apart(self, example: Question, logits: Callable[[], Tensor]) -> str:
        self._head.forward, self._model.forward = self._head_forward, self._model_forward
        self._enlarges = True
        apart = float("nan")
        try:
            wanted = self.answer(example, logits)[0]
            tolerance = _LARGE * _APART_MAX.get(self._computed, _APART_MAX_HALF)
            self.by_blocks = True
            for reading in readings(self._model.config):
                self._reading = replace(reading, gradient_into=self._gradient_into)
                apart = float((self.answer(example, logits)[0] - wanted).abs().max())
                if apart < tolerance:
                    return ""
            why = f"by blocks its log-probabilities are up to {apart:.2g} nats off"
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
            why = f"its forward pass wants whole logits: {error}"
        finally:
            self._enlarges = False
        self.by_blocks = False
        self._head.forward, self._model.forward = self._own_head, self._own_model
        return why

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self._own_model(*args, **kwargs)
        if self._question is None:
            return output
        if self._answer is None:
            raise RuntimeError("it does not call its head")
        return _Answer(self._answer)

    def _head_forward(self, hidden: Tensor) -> Tensor:
        self._computed = hidden.dtype
        if self._enlarges:
            hidden = hidden * (_LARGE / self._own_head(hidden).abs().max().clamp(min=1e-6)).to(hidden.dtype)
        question = self._question
        if question is None:
            return self._own_head(hidden)
        reading = replace(
            self._reading,
            temperature=used_temperature(question.temperature),
            learns_entropy=question.learns_entropy,
        )
        weight, flat = self._head.weight, hidden.reshape(-1, hidden.shape[-1])
        low, up = (None, None) if self._factors is None else self._factors(flat)
        both: Any = TokenLogprobs.apply(flat, weight, question.rows, question.targets, reading, low, up)
        self._answer = torch.stack(both)[None]
        return hidden.new_zeros(1, 1, 1)


def readings(config: Any) -> Iterator[Reading]:
    """What a model of ``config`` may do to its logits, likeliest first.

    ``logits_scaling`` divides them in Granite and multiplies them in HyperCLOVA X; in MiniCPM it scales hidden states.
    """
    text = config.get_text_config()
    caps = (getattr(text, name, None) for name in ("final_logit_softcapping", "logits_soft_cap"))
    cap = float(next(filter(None, caps), 0.0))
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier"):
        scale *= float(getattr(text, name, None) or 1.0)
    other = float(getattr(text, "logits_scaling", None) or 1.0)
    for factor in dict.fromkeys((scale / other, scale * other, 1.0)):
        yield Reading(scale=factor, cap=cap)


def _more_than_a_matrix(head: nn.Module) -> str:
    """What a head has besides its weight and an adapter of ours, empty if nothing."""
    if type(head) is not nn.Linear:
        return f"its head is a {type(head).__name__}"
    if head.bias is not None:
        return "its head has a bias"
    if next(head.children(), None) is not None and factors_of(head) is None:
        return "its head has parts of its own"
    return ""


@functools.cache
def _tell(model: str, why: str) -> None:
    """Once for all models of a kind in this process."""
    log.warning(
        "logits of all tokens of a micro-batch are kept: this model's head cannot be computed in blocks",
        model=model,
        why=why,
    )
