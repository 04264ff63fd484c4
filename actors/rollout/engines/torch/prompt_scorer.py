"""Scores the tokens of a prompt by the model's own ``forward``, some positions at a time.

    prompt[0 … p - 2] ─ part ─▶ forward behind the keys and values of the parts before ─▶ logits [n, V] of the part
                                                                                          │ some rows, in float64
                                              prompt[1 … p - 1] ─ log-probability, top k ◀┘

Invariants
- A prompt is scored alone, so its scores do not depend on what else the engine computes.
- Memory holds the logits of one part, ``PART_LOGITS`` of them or one position's, never of a whole long prompt.
- The running rows and their cache are not touched.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from actors.rollout.engine import PromptScores
from actors.rollout.engines.torch.side_adapters import SideAdapters
from actors.rollout.errors import LogitsNotFinite

PART_LOGITS: Final = 1 << 25
"""Logits of a part: 64 MiB in bfloat16. With fewer, a large model reads all its weights for a few positions."""
WIDE_LOGITS: Final = 1 << 22
"""Logits in float64 at a time: 32 MiB, of which there are two or three."""


class PromptScorer:
    """Scores prompts by the present weights of ``model``.

    Args:
        in_parts: whether keys and values of a token depend on the tokens before it alone; else a prompt is one part.
        part_logits: size of a part; ``PART_LOGITS`` but in tests.
        side: adapters by which prompts may be scored; None: there are none.
    """

    def __init__(
        self, model: Any, *, in_parts: bool, part_logits: int = PART_LOGITS, side: SideAdapters | None = None
    ) -> None:
        self._model, self._in_parts, self._part_logits = model, in_parts, part_logits
        self._side = side or SideAdapters(model)
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def score(self, prompt: NDArray[np.int32], top_k: int, adapter: int = 0) -> PromptScores:
        """Score ``prompt``, int32[p], by an ``adapter``; with the ``top_k`` likeliest tokens of each position.

        Raises:
            LogitsNotFinite: the weights are broken.
        """
        ids = torch.from_numpy(prompt.astype(np.int64)).to(self._model.device)
        known = len(prompt) - 1  # nothing is asked of what follows the last token
        logprobs = np.full(len(prompt), np.nan, np.float32)
        top_ids = np.full((len(prompt), top_k), -1, np.int32)
        top_logprobs = np.full((len(prompt), top_k), np.nan, np.float32)
        cache = DynamicCache()
        width, begin = self._part(known), 0
        with torch.inference_mode(), self._side.beside(np.array([adapter])):
            while begin < known:
                end = min(begin + width, known)
                logits = self._logits(ids, begin, end, cache)
                rows = max(1, WIDE_LOGITS // logits.shape[1])
                for first in range(begin, end, rows):
                    place = slice(first + 1, min(first + rows, end) + 1)
                    some = logits[first - begin : place.stop - 1 - begin]
                    logprobs[place], top_ids[place], top_logprobs[place] = _scored(some, ids[place], top_k)
                begin = end
        if not np.isfinite(logprobs[1:]).all():
            raise LogitsNotFinite("a prompt's logits are not finite: the weights are broken")
        return PromptScores(logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs)

    def _part(self, known: int) -> int:
        vocab = int(self._model.get_input_embeddings().weight.shape[0])
        return max(1, self._part_logits // vocab) if self._in_parts else known

    def _logits(self, ids: Tensor, begin: int, end: int, cache: DynamicCache) -> Tensor:
        """Logits [n, V] of what follows tokens ``begin`` … ``end - 1``, whose keys and values join ``cache``."""
        extra: dict[str, Any] = {}
        if self._takes_positions:
            extra["position_ids"] = torch.arange(begin, end, device=ids.device).unsqueeze(0)
        output = self._model(
            input_ids=ids[begin:end].unsqueeze(0),
            attention_mask=torch.ones(1, end, dtype=torch.int64, device=ids.device),
            past_key_values=cache,
            use_cache=True,
            **extra,
        )
        return output.logits[0]


def _scored(
    logits: Tensor, targets: Tensor, top_k: int
) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
    """Log-probabilities of ``targets`` [n], and the likeliest tokens with theirs [n, top_k], for ``logits`` [n, V]."""
    wide = logits.double()
    total = wide.logsumexp(-1, keepdim=True)
    picked = wide.gather(-1, targets.unsqueeze(1)) - total
    values, tokens = wide.topk(top_k, dim=-1)
    return (
        picked[:, 0].float().cpu().numpy(),
        tokens.int().cpu().numpy(),
        (values - total).float().cpu().numpy(),
    )
