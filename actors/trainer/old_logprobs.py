"""Log-probabilities of a step's tokens under the weights before it: the old policy of a step with several updates.

The trainer computes them, once, before the first update. The engine's would do for a ratio, too, but a clip around them
would bound numerics as well, and their last bits depend on who generated what beside whom: a run that lost a worker
would end with other weights. In a step of one update they are what that update computes anyway, so nothing is asked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from actors.trainer.backend import MicroBatch
from actors.trainer.batching import TrainSample, pad, portions


async def with_old_logprobs(
    samples: Sequence[TrainSample], score: Callable[[MicroBatch], Awaitable[np.ndarray]], *, budget_tokens: int
) -> list[TrainSample]:
    """The samples that have a response, with ``old_logprobs``. ``score``: MicroBatch → float32[B, T]."""
    answered = [sample for sample in samples if sample.tokens.size]
    found: dict[tuple[int, int, int], np.ndarray] = {}
    for part in portions(answered, budget_tokens=budget_tokens):
        scores = await score(pad(part))
        for sample, line in zip(part, scores, strict=True):
            found[sample.name] = line[sample.prompt_ids.size : sample.length].copy()
    return [dataclasses.replace(s, old_logprobs=found[s.name]) for s in answered]
