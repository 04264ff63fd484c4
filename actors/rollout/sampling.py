"""Sampling noise that depends on the token alone, not on the machine that draws it.

Invariants
- The noise of a token is a pure function of (job seed, prompt, sibling, position in the response). It depends neither
  on the worker, nor on what else is in the batch, nor on how often a sample has moved.
- Each token needs one uniform; it is in the open interval (0, 1), a float64 with 52 random bits.

    (seed, prompt, sibling) ── stream_keys ──▶ key ┐
                                        position ──┴─ uniforms ──▶ u ── inverse CDF (engines/token_sampler.py) ──▶ token

The generator is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014) in its
counter form: the i-th output of a stream is ``mix(key + (i + 1) * GOLDEN)``, so any position is reached at once.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

UInt64s = NDArray[np.uint64]

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S12 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(12)


def _mix(state: UInt64s) -> UInt64s:
    state = (state ^ (state >> _S30)) * _MIX_1
    state = (state ^ (state >> _S27)) * _MIX_2
    return state ^ (state >> _S31)


def _as_words(values: NDArray[np.int64] | int) -> UInt64s:
    return np.atleast_1d(np.asarray(values, dtype=np.int64)).astype(np.uint64)


def stream_keys(seed: int, prompts: NDArray[np.int64] | int, siblings: NDArray[np.int64] | int) -> UInt64s:
    """Keys of the samples' noise streams: uint64[n] for prompts int[n] and siblings int[n] (or one of each)."""
    with np.errstate(over="ignore"):
        key = _mix(np.atleast_1d(np.uint64(seed & 0xFFFFFFFFFFFFFFFF)) + _GOLDEN)
        key = _mix((key ^ _as_words(prompts)) + _GOLDEN)
        return _mix((key ^ _as_words(siblings)) + _GOLDEN)


def uniforms(keys: UInt64s, positions: NDArray[np.int64] | int) -> NDArray[np.float64]:
    """Draw a uniform of (0, 1) for each token: float64[n] for stream keys uint64[n] and response positions int[n]."""
    with np.errstate(over="ignore"):
        bits = _mix(keys + (_as_words(positions) + np.uint64(1)) * _GOLDEN)
    # 52 bits, since with 53 the largest one would round up to 1.0
    return ((bits >> _S12).astype(np.float64) + 0.5) * (1.0 / (1 << 52))
