"""Log-probabilities and entropies of chosen tokens, with their gradients, in blocks of rows.

    hidden[U, H], weight[V, H] ─ a block of rows ─▶ h Wᵀ ─┐   with an adapter: h Wᵀ + low upᵀ
    or logits[U, V], all in one block ────────────────────┴─ some rows ─▶ cap tanh(scale · / cap) / temperature = z
    z ─┬─▶ log p(target), float32[N]       d log p / d z = (target) - p
       └─▶ entropy H, float32[N]           d H / d z = -p (log p + H)

Of the logits that it computes it keeps the last ``KEPT_ELEMENTS``, and the backward pass computes the others again:
memory does not grow with the number of rows, and few rows cost no second product. The weight's gradient is summed in
float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from actors.models.matmul import linear

_OUTER_ELEMENTS: Final = 1 << 24
"""Numbers of a weight's gradient that one product of a block gives, before they are added to the sum."""
_HOST_ELEMENTS: Final = 1 << 22
"""Logits in float32 at a time on a CPU: 16 MiB, which the next ones find in its caches and not with the system."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Says how logits become log-probabilities. ``scale`` and ``cap`` are the model's own, a cap of 0 is none."""

    temperature: float = 1.0
    learns_entropy: bool = False
    scale: float = 1.0
    cap: float = 0.0
    gradient_into: Tensor | None = None
    """Sum, float32[V, H], to which the weight's gradient is added; without one the gradient is returned."""


class TokenLogprobs(torch.autograd.Function):
    """Computes log-probabilities and entropies of chosen tokens in float32, from hidden states or logits.

    ``low`` [U, rank] and ``up`` [V, rank], both or none, are an adapter's part of the logits.
    """

    BLOCK_BYTES = 1 << 28
    """Logits that one product gives. With fewer the products are slower."""
    KEPT_ELEMENTS = 1 << 28
    """Logits that are kept for the backward pass: 1 GiB in float32, half of it in half precision."""
    ELEMENTS = 1 << 24
    """Logits in float32 at a time: 64 MiB, of which there are two or three."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        states: Tensor,
        weight: Tensor | None,
        rows: Tensor,
        targets: Tensor,
        reading: Reading,
        low: Tensor | None = None,
        up: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        normalisers, entropies = states.new_empty((2, states.shape[0]), dtype=torch.float32)
        picked = torch.zeros(targets.shape[0], dtype=torch.float32, device=states.device)
        kept: list[Tensor] = []
        for block in _blocks(states, weight):
            raw = states if weight is None else _logits(states[block], weight, low, up, block)
            for some in _few(raw):
                logs = _scaled(raw[some], reading)
                maxima = logs.amax(dim=-1)
                shares = torch.exp(logs.sub_(maxima[:, None]))
                total = shares.sum(dim=-1)
                place = slice(block.start + some.start, block.start + some.stop)
                normalisers[place] = maxima + total.log()
                products = torch.einsum("nv,nv->n", shares, _finite(logs, weight))
                entropies[place] = total.log() - products / total
            row, here = _rows_in(raw, rows - block.start)
            picked += torch.where(here, _scaled(raw[row, targets], reading), 0.0)
            if weight is not None:
                kept.append(raw)
                while sum(one.numel() for one in kept) > TokenLogprobs.KEPT_ELEMENTS:
                    del kept[0]
        ctx.save_for_backward(states, weight, rows, targets, normalisers, entropies, low, up, *kept)
        ctx.reading = reading
        token_entropies = entropies[rows]
        if not reading.learns_entropy:
            ctx.mark_non_differentiable(token_entropies)
        return picked - normalisers[rows], token_entropies

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, Tensor | None, Tensor | None]:
        states, weight, rows, targets, normalisers, entropies, low, up, *kept = ctx.saved_tensors
        reading: Reading = ctx.reading
        needs_states, needs_weight, *_ = ctx.needs_input_grad
        factor = reading.scale / reading.temperature
        pull = grad_logprobs * factor
        row_pull = torch.zeros_like(normalisers).index_add_(0, rows, pull)
        spread = None
        if reading.learns_entropy:
            spread = torch.zeros_like(normalisers).index_add_(0, rows, grad_entropies * factor)
        by_states = torch.empty_like(states) if needs_states else None
        by_weight = None
        if needs_weight and (by_weight := reading.gradient_into) is None:
            by_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        by_low = None if low is None else torch.empty_like(low)
        by_up = None if up is None else torch.zeros(up.shape, dtype=torch.float32, device=up.device)
        for block in reversed(list(_blocks(states, weight))):
            raw: Any = states
            by_raw: Any = by_states
            if weight is not None:
                raw = by_raw = kept.pop() if kept else _logits(states[block], weight, low, up, block)
            for some in _few(raw):
                place = slice(block.start + some.start, block.start + some.stop)
                surprise = None if spread is None else (spread[place, None], entropies[place, None])
                logs = _scaled(raw[some], reading).sub_(normalisers[place, None])
                slope = _slope(logs, normalisers[place, None], reading) if reading.cap else None
                part = _gradient(logs, row_pull[place, None], surprise, weight)
                row, here = _rows_in(part, rows - place.start)
                part.view(-1).index_add_(0, row * part.shape[1] + targets, torch.where(here, pull, 0.0))
                by_raw[some] = part if slope is None else part.mul_(slope)
            if weight is not None and by_states is not None:
                by_states[block] = linear(by_raw, weight.t())
            if by_weight is not None:
                _add_product(by_weight, by_raw, states[block])
            if low is not None and up is not None and by_low is not None and by_up is not None:
                by_low[block] = linear(by_raw, up.t())
                _add_product(by_up, by_raw, low[block])
            raw = by_raw = None  # free the block before the next one is made
        if by_weight is reading.gradient_into:
            by_weight = None  # it is where it belongs
        by_weight, by_up = (None if part is None else part.to(states.dtype) for part in (by_weight, by_up))
        return by_states, by_weight, None, None, None, by_low, by_up


def _blocks(states: Tensor, weight: Tensor | None) -> Iterator[slice]:
    count = states.shape[0]
    if weight is None:
        return iter([slice(0, count)])
    size = max(1, TokenLogprobs.BLOCK_BYTES // states.itemsize // weight.shape[0])
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _logits(states: Tensor, weight: Tensor, low: Tensor | None, up: Tensor | None, block: slice) -> Tensor:
    raw = linear(states, weight)
    return raw if low is None or up is None else raw.addmm_(low[block], up.t())


def _few(raw: Tensor) -> Iterator[slice]:
    count, vocabulary = raw.shape
    elements = min(TokenLogprobs.ELEMENTS, _HOST_ELEMENTS) if raw.device.type == "cpu" else TokenLogprobs.ELEMENTS
    size = max(1, elements // vocabulary)
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _scaled(raw: Tensor, reading: Reading) -> Tensor:
    """Logits as the model means them, over the temperature, float32 in memory of their own."""
    logits = raw.to(torch.float32, copy=True)
    if reading.scale != 1.0:
        logits.mul_(reading.scale)
    if reading.cap:
        logits.div_(reading.cap).tanh_().mul_(reading.cap)
    return logits if reading.temperature == 1.0 else logits.div_(reading.temperature)


def _slope(logs: Tensor, normalisers: Tensor, reading: Reading) -> Tensor:
    """Derivative of the capped logits."""
    return (logs + normalisers).mul_(reading.temperature / reading.cap).square_().neg_().add_(1.0)


def _gradient(logs: Tensor, pull: Tensor, surprise: tuple[Tensor, Tensor] | None, weight: Tensor | None) -> Tensor:
    """What log-probabilities ``logs`` of a row get whatever the target, in their place."""
    if surprise is None:
        return logs.exp_().mul_(-pull)
    spread, entropies = surprise
    part = torch.exp(logs)
    return part.mul_(_finite(logs, weight).add_(entropies).mul_(-spread).sub_(pull))


def _finite(logs: Tensor, weight: Tensor | None) -> Tensor:
    """``logs`` with 0 for the -inf by which a model masks a token, whose probability is 0; products have none."""
    return logs.nan_to_num_(neginf=0.0) if weight is None else logs


def _rows_in(table: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of ``table``, any for those that it does not have, and which it has. Picking these by a mask would make the
    host wait for the device.
    """
    count = table.shape[0]
    return rows.clamp(0, count - 1), (rows >= 0) & (rows < count)


def _add_product(total: Tensor, part: Tensor, states: Tensor) -> None:
    """Add ``partᵀ states`` to ``total`` float32[V, H], in half precision some of the vocabulary at a time."""
    if part.dtype == torch.float32:
        total.addmm_(part.t(), states)
        return
    size = max(1, _OUTER_ELEMENTS // total.shape[1])
    for start in range(0, total.shape[0], size):
        some = slice(start, start + size)
        total[some].add_(linear(part[:, some].t(), states.t()))


def used_temperature(temperature: float) -> float:
    """The temperature of the distribution whose log-probabilities are meant. Temperature 0 is greedy decoding, whose
    distribution has no gradient: the distribution at 1 is used instead.
    """
    return temperature if temperature > 0 else 1.0


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    rows: Tensor | None = None,
    *,
    learns_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies), float32[n], of ``targets`` int64[n] under ``logits`` [u, V] and a temperature.

    ``rows`` int64[n] names the row of logits that predicts each target, since several may share one; by default
    row i predicts target i. The log-probabilities carry gradient, the entropies if ``learns_entropy``.
    """
    if rows is None:
        rows = torch.arange(targets.shape[0], device=targets.device)
    reading = Reading(temperature=used_temperature(temperature), learns_entropy=learns_entropy)
    return TokenLogprobs.apply(logits, None, rows, targets, reading)  # type: ignore[return-value]
