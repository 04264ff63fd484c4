"""Chooses the source of each prompt where there are several: a function of weights and seed, without state.

    ordinal n ─▶ u(n) = offset + n · step  (mod 2^64), even over all values ─▶ the source in whose share it lies

Invariants
- Of any n consecutive prompts each source has its share, give or take a few: ``step`` is 2^64 / the golden ratio.
- How many prompts of a source come before ordinal n is computed, not counted, so a run resumes at any ordinal at once.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Final

from configs.task_schema import DataConfig

_ALL: Final = 1 << 64
_STEP: Final = 0x9E3779B97F4A7C15
"""Step of u: odd, so that every value comes once before any comes again."""


class Mix:
    """Says which source each prompt of a stream is from, and which prompt of that source it is."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        shares = [Fraction(weight) for weight in weights]
        total = sum(shares)
        self._ends = [int(end / total * _ALL) for end in accumulate(shares)]
        self._offset = random.Random(f"headrace mix {seed}").getrandbits(64)

    @classmethod
    def of(cls, data: DataConfig, seed: int) -> Mix:
        """The mix of ``data``, which has several sources."""
        return cls([source.weight for source in data.mix], seed)

    def source_of(self, ordinal: int) -> int:
        """Index of the source of prompt ``ordinal``."""
        return bisect.bisect_right(self._ends, (self._offset + ordinal * _STEP) % _ALL)

    def before(self, ordinal: int) -> list[int]:
        """How many of the prompts before ``ordinal`` are from each source."""
        below = [self._below(end, ordinal) for end in self._ends]
        return [end - begin for begin, end in zip([0, *below[:-1]], below, strict=True)]

    def _below(self, end: int, count: int) -> int:
        """How many of the first ``count`` ordinals have u below ``end``, by how often u passes 0 and ``end``."""
        passed_zero = _floor_sum(count, _ALL, _STEP, self._offset)
        passed_end = _floor_sum(count, _ALL, _STEP, self._offset + _ALL - end)
        return passed_zero - passed_end + count


def _floor_sum(count: int, modulus: int, step: int, offset: int) -> int:
    """Sum of floor((step · i + offset) / modulus) over i from 0 to count - 1, by Euclid's algorithm."""
    total = 0
    while count:
        total += count * (count - 1) // 2 * (step // modulus) + count * (offset // modulus)
        step, offset = step % modulus, offset % modulus
        last = step * count + offset
        count, offset = last // modulus, last % modulus
        modulus, step = step, modulus
    return total
