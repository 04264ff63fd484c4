"""Sampling of snapshots: what is asked for, and what is answered.

caller ──AskSample──▶ sampler ── the snapshot is in the engine, or its turn comes ──▶ Sampled ──▶ caller

Always true
- A snapshot is a directory whose content never changes: an adapter of the sampler's base model as PEFT writes it, or a
  whole model of the same architecture. None is the base model itself.
- A question can be asked again: with a ``seed`` the answer is the same, whatever else the sampler computes.
- An answer holds as many sequences as were asked for, in their order. A caller that gives up ends its sequences.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from actors.core.message import Message, message


class SampleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Says what is to be sampled, of which snapshot, and how."""

    prompt: np.ndarray  # int32[p], p at least 1
    snapshot: str | None = None
    """Directory of the snapshot; None: the base model."""
    samples: int = 1
    max_tokens: int | None = None
    """Most tokens of a sequence; None: as many as the context has room for."""
    temperature: float = 1.0
    """Temperature; 0: always the likeliest token."""
    top_k: int = -1
    """Number of likeliest tokens to draw from; -1: no limit."""
    top_p: float = 1.0
    seed: int | None = None
    """Seed of the noise, together with the prompt and the number of the sequence; None: the sampler draws one."""
    stop: tuple[int | str, ...] | None = None
    """Ids of tokens, or texts, each of which ends a sequence and nothing else does; None: the model's end tokens."""
    prompt_logprobs: bool = False
    """Whether the tokens of the prompt are scored, too."""
    top_prompt_logprobs: int = 0
    """Number of likeliest tokens that are told at each position of the prompt."""
    top_logprobs: int = 0
    """Number of likeliest tokens that are told at each position of a sequence; 0 with an engine that tells none."""


class SampledSequence(msgspec.Struct, frozen=True):
    """Holds one sequence. A stop token, or the token that completes a stop text, is its last one."""

    stop_reason: Literal["stop", "length"]
    tokens: np.ndarray  # int32[n], n at least 1
    logprobs: np.ndarray  # float32[n], of the distribution that each token was drawn from
    top_ids: np.ndarray | None = None
    """int32[n, k], the likeliest first, if that was asked for."""
    top_logprobs: np.ndarray | None = None
    """float32[n, k], of the same distribution; -inf for a token that could not be drawn."""


class SampleResult(msgspec.Struct, frozen=True):
    """Holds the sequences, and what the snapshot says of the prompt at temperature 1, if that was asked for."""

    sequences: list[SampledSequence]
    prompt_logprobs: np.ndarray | None = None
    """float32[p]; the first is NaN, as nothing comes before that token."""
    top_prompt_ids: np.ndarray | None = None
    """int32[p, k], the likeliest first; -1 at the first position."""
    top_prompt_logprobs: np.ndarray | None = None
    """float32[p, k]; NaN at the first position."""


@message("sampling.ask")
class AskSample(Message):
    """A caller has something sampled. Reply: Sampled, or an error of ``actors/sampling/errors.py``."""

    request: SampleRequest


@message("sampling.sampled")
class Sampled(Message):
    result: SampleResult
