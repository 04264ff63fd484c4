"""How long will the responses to a prompt be? One protocol, three kinds (StreamRL 1.5).

    history    the same prompt in earlier epochs           length_history.py
    siblings   what its own group has come to so far       length_siblings.py
    learned    a small model, fine-tuned beside the run    length_learned.py, actors/ranker

Only the order counts: samples are handed out in descending expected length, so a predictor that is wrong by a constant
factor is as good as a right one.

Invariants
- A predictor is a fold over what it was told: no clock, no I/O, no randomness; equal news give equal answers.
- It answers at once, with NaN for a prompt of which it knows nothing: nobody waits for a prediction, and whoever sorts
  takes such a prompt as median.
- Predictions change the order of hand-outs and nothing else. A sample's tokens are a function of (seed, prompt,
  sibling, position), so no prediction can change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash


@dataclass(frozen=True, slots=True)
class PromptsView:
    """It shows some prompts of one batch, and what their samples have come to. p prompts, g siblings each."""

    keys: np.ndarray  # uint64[p]: equal prompts have equal keys, in every epoch
    lengths: np.ndarray  # int32[p, g] response tokens so far
    finished: np.ndarray  # bool[p, g]


class LengthPredictor(Protocol):
    """It predicts as the module's docstring says. ``test_length_predictor_contract.py`` is its contract."""

    probes: int
    """Siblings of each prompt that go before everybody else, because what they come to is what the predictor learns
    from; 0 for one that learns elsewhere."""

    def expected(self, view: PromptsView) -> np.ndarray:
        """float64[p] expected response tokens; NaN where it knows nothing."""
        ...

    def observe(self, view: PromptsView) -> None:
        """Learn from these prompts, all samples of which have come to an end."""
        ...


def prompt_keys(prompt_ids: Sequence[np.ndarray]) -> np.ndarray:
    """uint64[p] that name prompts by their tokens: a job file has no other name for a prompt than its text."""
    digests = (xxhash.xxh3_64_intdigest(np.ascontiguousarray(ids, "<i4").tobytes()) for ids in prompt_ids)
    return np.fromiter(digests, np.uint64, len(prompt_ids))


def mean_lengths(view: PromptsView) -> np.ndarray:
    """float64[p] mean length of each prompt's finished samples; NaN where none has finished."""
    count = view.finished.sum(axis=1)
    total = (view.lengths * view.finished).sum(axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
