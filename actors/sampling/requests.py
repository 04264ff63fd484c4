"""Checks a request before anything is computed for it, so that no engine meets what would disturb others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from actors.protocol.sampling import SampleRequest
from actors.sampling.errors import BadSampleRequest
from configs.limits import Limits

LEAST_TEMPERATURE: Final = 1e-6
"""Temperature below which scaled logits may overflow; 0 is the way to say: the likeliest token."""
_SEED_BITS: Final = 63


@dataclass(frozen=True, slots=True)
class Bounds:
    """Holds what requests are checked against."""

    vocab: int
    context_tokens: int
    limits: Limits
    tells_top_logprobs: bool = False
    """Whether the engine does, at the positions of a sequence."""


def check_request(request: SampleRequest, bounds: Bounds) -> None:
    """Refuse what cannot be computed.

    Raises:
        BadSampleRequest: names the first field that is wrong, its value, and what is expected.
    """
    limits = bounds.limits
    _check_prompt(request.prompt, bounds)
    _within("samples", request.samples, 1, limits.sampling_samples)
    if request.max_tokens is not None:
        _within("max_tokens", request.max_tokens, 1, math.inf)
    heat = request.temperature
    if heat != 0 and not (heat >= LEAST_TEMPERATURE and math.isfinite(heat)):
        raise wrong("temperature", heat, f"0 for the likeliest token, or a finite number from {LEAST_TEMPERATURE:g}")
    if request.top_k != -1:
        _within("top_k", request.top_k, 1, (1 << 31) - 1, "-1 for no limit, or")
    if not 0 < request.top_p <= 1:
        raise wrong("top_p", request.top_p, "above 0, and at most 1")
    if request.seed is not None:
        _within("seed", request.seed, -(1 << _SEED_BITS), (1 << _SEED_BITS) - 1)
    _check_stop(request.stop, bounds)
    most = min(limits.sampling_top_logprobs, bounds.vocab)
    _within("top_prompt_logprobs", request.top_prompt_logprobs, 0, most)
    if request.top_logprobs and not bounds.tells_top_logprobs:
        raise wrong("top_logprobs", request.top_logprobs, "0, since this engine tells none of a sequence: use torch")
    _within("top_logprobs", request.top_logprobs, 0, most)


def _check_prompt(prompt: np.ndarray, bounds: Bounds) -> None:
    if prompt.ndim != 1 or not np.issubdtype(prompt.dtype, np.integer):
        raise wrong("prompt", f"{prompt.dtype}{list(prompt.shape)}", "token ids in one dimension, int32[p]")
    if not 0 < len(prompt) < bounds.context_tokens:
        expected = (
            f"1 to {bounds.context_tokens - 1}, since the context of {bounds.context_tokens} holds the answer too"
        )
        raise wrong("prompt", f"{len(prompt)} tokens", expected)
    outside = prompt[(prompt < 0) | (prompt >= bounds.vocab)]
    if len(outside):
        raise wrong("prompt", f"the token id {outside[0]}", f"ids of the model's vocabulary, 0 to {bounds.vocab - 1}")


def _check_stop(stop: tuple[int | str, ...] | None, bounds: Bounds) -> None:
    limits = bounds.limits
    if stop is None:
        return
    if len(stop) > limits.sampling_stops:
        raise wrong("stop", f"{len(stop)} entries", f"at most {limits.sampling_stops} (limits.sampling_stops)")
    if len({isinstance(one, str) for one in stop}) > 1:
        raise wrong("stop", "ids and texts", "either ids of tokens, or texts")
    for one in stop:
        if isinstance(one, str):
            if not 0 < len(one) <= limits.sampling_stop_chars:
                raise wrong("stop", f"a text of {len(one)} characters", f"1 to {limits.sampling_stop_chars}")
        else:
            _within("stop", one, 0, bounds.vocab - 1)


def _within(field: str, value: int, least: int, most: float, also: str = "") -> None:
    if not least <= value <= most:
        reach = f"at least {least}" if most == math.inf else f"{least} to {most}"
        raise wrong(field, value, f"{also} {reach}".strip())


def wrong(field: str, value: object, expected: str) -> BadSampleRequest:
    """The error of a ``field`` that cannot be served."""
    return BadSampleRequest(f"{field} is {value}: expected {expected}")
