"""Log-probabilities and entropies of chosen tokens, from logits of any float dtype, with their gradients.

logits[u, V], rows[n], targets[n] ─▶ log p(target), float32[n]       d log p / d logit = (target) - p
                                  └▶ entropy H, float32[n]           d H / d logit = -p (log p + H)
"""

from __future__ import annotations

import torch
from torch import Tensor


class TokenLogprobs(torch.autograd.Function):
    """Computes log-probabilities and entropies of chosen tokens, from logits of any float dtype, in float32.

    Keeps the logits and one float a row, no float32 copy of the logits; row blocks bound what is computed at once.
    """

    BLOCK_ELEMENTS = 1 << 24

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx,
        logits: Tensor,
        rows: Tensor,
        targets: Tensor,
        temperature: float,
        learns_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        count, vocabulary = logits.shape
        normalisers = torch.empty(count, dtype=torch.float32, device=logits.device)
        entropies = torch.empty_like(normalisers)
        block_rows = max(1, TokenLogprobs.BLOCK_ELEMENTS // vocabulary)
        for start in range(0, count, block_rows):
            block = slice(start, start + block_rows)
            scaled = logits[block].float() / temperature
            normaliser = torch.logsumexp(scaled, dim=-1)
            probabilities = torch.exp(scaled - normaliser[:, None])
            # -inf logits (tokens a model masks) have probability 0 and no share of the entropy
            finite = torch.nan_to_num(scaled, neginf=0.0)
            entropies[block] = normaliser - torch.einsum("nv,nv->n", probabilities, finite)
            normalisers[block] = normaliser
        logprobs = logits[rows, targets].float() / temperature - normalisers[rows]
        ctx.save_for_backward(logits, rows, targets, normalisers, *([entropies] if learns_entropy else []))
        ctx.temperature = temperature  # type: ignore[attr-defined]
        token_entropies = entropies[rows]
        if not learns_entropy:
            ctx.mark_non_differentiable(token_entropies)
        return logprobs, token_entropies

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, grad_logprobs: Tensor, grad_entropies: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        logits, rows, targets, normalisers, *entropies = ctx.saved_tensors  # type: ignore[attr-defined]
        temperature: float = ctx.temperature  # type: ignore[attr-defined]
        grad = torch.empty_like(logits)
        scale = grad_logprobs / temperature
        row_scale = torch.zeros_like(normalisers).index_add_(0, rows, scale)
        entropy_scale = None
        if entropies:
            entropy_scale = torch.zeros_like(normalisers).index_add_(0, rows, grad_entropies / temperature)
        block_rows = max(1, TokenLogprobs.BLOCK_ELEMENTS // logits.shape[1])
        for start in range(0, logits.shape[0], block_rows):
            block = slice(start, start + block_rows)
            logs = logits[block].float() / temperature - normalisers[block, None]
            part = torch.exp(logs)
            if entropy_scale is None:
                part.mul_(-row_scale[block, None])
            else:
                finite = torch.nan_to_num(logs, neginf=0.0)  # there p is 0
                surprise = finite + entropies[0][block, None]
                part.mul_(-row_scale[block, None] - entropy_scale[block, None] * surprise)
            # all tokens, those of other blocks with 0: to pick some by a mask would make the host wait for the device
            here = (rows >= start) & (rows < start + block_rows)
            place = (rows - start).clamp(0, part.shape[0] - 1) * part.shape[1] + targets
            part.view(-1).index_add_(0, place, torch.where(here, scale, 0.0))
            grad[block] = part.to(logits.dtype)
        return grad, None, None, None, None


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    rows: Tensor | None = None,
    *,
    learns_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies), float32[n], of ``targets`` int64[n] under ``logits`` [u, V] and a temperature.

    ``rows`` int64[n] names the row of logits that predicts each target, for several may share one; by default it is
    row i for target i. Temperature 0 is greedy decoding, whose distribution has no gradient: the distribution at 1 is
    used instead. The log-probabilities carry gradient, the entropies if ``learns_entropy``.
    """
    if rows is None:
        rows = torch.arange(targets.shape[0], device=targets.device)
    result = TokenLogprobs.apply(logits, rows, targets, temperature if temperature > 0 else 1.0, learns_entropy)
    return result[0], result[1]  # type: ignore[index]
