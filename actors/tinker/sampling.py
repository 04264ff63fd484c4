"""What answers a Tinker client's samples, as a protocol: whoever drives engines implements it.

Invariants
- An equal request gives equal tokens: it names its seed, so one that was interrupted is asked again.
- A snapshot is a directory that ``Learner.export`` wrote; it never changes. None is the base model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Says how tokens are drawn, and where a sequence ends."""

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_k: int = -1
    """Number of likeliest tokens that are drawn from; -1: all."""
    top_p: float = 1.0
    stop_texts: tuple[str, ...] = ()
    """Texts after which a sequence ends; they are part of it, as stop tokens are."""
    stop_tokens: tuple[int, ...] = ()
    stops_at_eos: bool = True
    topk: int = 0
    """Number of likeliest tokens that are told at each position of a sequence."""


@dataclass(frozen=True)
class TopTokens:
    """Holds the likeliest tokens at each position of n tokens; where there is none, 0 and -99999."""

    tokens: np.ndarray  # int32[n, k]
    logprobs: np.ndarray  # float32[n, k]


@dataclass(frozen=True)
class SampledSequence:
    """Holds one sampled sequence."""

    stopped: bool
    """Whether it ended by a stop, and not by its length."""
    tokens: np.ndarray  # int32[t]
    logprobs: np.ndarray  # float32[t]
    top: TopTokens | None = None
    """The likeliest tokens at each of its positions, of the distribution that was drawn from."""


@dataclass(frozen=True)
class Sampled:
    """Holds the answer to one request for samples."""

    sequences: list[SampledSequence]
    prompt_logprobs: np.ndarray | None = None  # float32[n]; NaN where there is none, as for the first token
    prompt_top: TopTokens | None = None


class Sampler(Protocol):
    """Samples from one base model, and from snapshots of models trained on it."""

    async def sample(
        self,
        snapshot: Path | None,
        prompt: np.ndarray,  # int32[n]
        n: int,
        parameters: SamplingParameters,
        *,
        prompt_logprobs: bool,
        topk_prompt_logprobs: int,
    ) -> Sampled:
        """Draw ``n`` sequences.

        Raises:
            OperationRefused: the snapshot or the parameters cannot be served.
        """
        ...
