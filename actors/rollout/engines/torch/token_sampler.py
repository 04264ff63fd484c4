"""Draws tokens by inverse CDF in float64, on any device.

Invariants
- A token and its log-probability depend on the row's own logits, noise and parameters alone.
- ``logprobs`` are of the distribution that was drawn from: after temperature, then top-k, then top-p.
- Temperature 0 takes the first of the largest logits. The log-probability is then the model's at temperature 1 (as in
  vLLM), since that of a point mass would say nothing.
- The likeliest tokens are those of the same distribution, with its log-probabilities to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.rollout.engine import TOP_TOKEN


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Holds sampling parameters in columns, one entry a row."""

    temperature: NDArray[np.float64]
    top_p: NDArray[np.float64]
    top_k: NDArray[np.int64]
    """Numbers of likeliest tokens to draw from; 0: no limit."""


def draw(
    logits: Tensor, noise: NDArray[np.float64], sampling: RowSampling
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """One token a row: tokens int64[n] and logprobs float32[n] for ``logits`` [n, vocab] and ``noise`` float64[n]."""
    scaled, greedy = _scaled(logits, sampling), sampling.temperature <= 0
    cumulative = scaled.exp().cumsum(-1)
    total = cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, _column(noise, scaled) * total, right=True)
    tokens = tokens.clamp_(
        max=scaled.shape[-1] - 1
    )  # only NaN logits reach the end; the caller sees a NaN log-probability
    if np.any(greedy):
        tokens = torch.where(_column(greedy, scaled, torch.bool), scaled.argmax(-1, keepdim=True), tokens)
    logprobs = scaled.gather(-1, tokens) - total.log()
    return tokens[:, 0].cpu().numpy(), logprobs[:, 0].float().cpu().numpy()


def likeliest(logits: Tensor, sampling: RowSampling, rows: NDArray[np.int64], most: int) -> NDArray[np.void]:
    """The ``most`` likeliest tokens of some ``rows``, likeliest first: TOP_TOKEN[n, most] for ``logits`` [n, vocab].

    A token that cannot be drawn has -inf; so have those beyond the vocabulary, and other rows.
    """
    told = np.full((len(logits), most), np.array((0, -np.inf), TOP_TOKEN))
    if not len(rows):
        return told
    some = RowSampling(sampling.temperature[rows], sampling.top_p[rows], sampling.top_k[rows])
    scaled = _scaled(logits[torch.from_numpy(rows).to(logits.device)], some)
    values, tokens = scaled.topk(min(most, scaled.shape[-1]), dim=-1)
    values = values - scaled.exp().cumsum(-1)[:, -1:].log()
    told["token"][rows, : tokens.shape[1]] = tokens.cpu().numpy()
    told["logprob"][rows, : tokens.shape[1]] = values.float().cpu().numpy()
    return told


def _scaled(logits: Tensor, sampling: RowSampling) -> Tensor:
    """Logarithms in float64 of the distributions that are drawn from, but for a constant a row: the likeliest has 0."""
    scaled = logits.double()
    greedy = sampling.temperature <= 0
    divisor = np.where(greedy, 1.0, sampling.temperature)
    if np.any(divisor != 1.0):
        scaled = scaled / _column(divisor, scaled)
    scaled = scaled - scaled.amax(-1, keepdim=True)
    if np.any(sampling.top_k > 0) or np.any(sampling.top_p < 1.0):
        scaled = _truncate(scaled, sampling, greedy)
    return scaled


def _column(
    values: NDArray[np.float64] | NDArray[np.bool_], like: Tensor, dtype: torch.dtype = torch.float64
) -> Tensor:
    return torch.as_tensor(values, dtype=dtype).to(like.device).unsqueeze(1)


def _truncate(scaled: Tensor, sampling: RowSampling, greedy: NDArray[np.bool_]) -> Tensor:
    """Set what lies outside the top-k and then outside the top-p of the rest to -inf; the likeliest token stays.

    Ties are broken by token id (stable sort), so that exactly k tokens stay.
    """
    vocab = scaled.shape[-1]
    top_k = np.where((sampling.top_k <= 0) | greedy, vocab, np.minimum(sampling.top_k, vocab)).astype(np.float64)
    top_p = np.where(greedy, 1.0, sampling.top_p)
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=scaled.device, dtype=torch.float64)
    ordered = ordered.masked_fill(rank >= _column(top_k, scaled), -torch.inf)
    mass = ordered.exp()
    before = mass.cumsum(-1) - mass
    outside = (before >= _column(top_p, scaled) * mass.sum(-1, keepdim=True)) & (rank > 0)
    outside &= _column(top_p, scaled) < 1.0
    ordered = ordered.masked_fill(outside, -torch.inf)
    return torch.full_like(scaled, -torch.inf).scatter(-1, order, ordered)
