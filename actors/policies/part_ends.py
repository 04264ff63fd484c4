"""When a worker ends that gets some neighbours of the prompts of a step, sorted by expected length.

    prompts, longest first      p0  p1  p2  p3  p4 …          ends(i)[j]: seconds for prompts i … j together
    a part                          └─ i … j ─┘

All samples of a part begin at once and each decode step gives one token to each, so between two ends the batch is
constant: seconds = Σ steps between two ends · step_s(batch, context). All parts that begin with the same prompt differ
in their last term only, so one cumulative sum has them all. What ``generation_time`` replays, event by event, this adds
up for hundreds of parts in a millisecond.

A part with more samples than places keeps all places full up to the level to which its later samples fill the places
that its first ones leave early; above it the first ones end as if alone. The replay differs a little, for one sample
is not poured into several places.
"""

from __future__ import annotations

import math

import numpy as np

from actors.policies.latency_table import LatencyTable, context_columns


class PartEnds:
    """It answers for one table and one number of places. Each first prompt is computed once, when it is asked for."""

    def __init__(
        self,
        tokens: np.ndarray,
        siblings: np.ndarray,
        prompt_tokens: np.ndarray,
        table: LatencyTable,
        slots: int,
        prefill_s: np.ndarray,
        kv_tokens: float = math.inf,
    ) -> None:
        """One entry for each prompt, longest first; ``prefill_s``: seconds of its one prefill.

        ``kv_tokens``: of the worker's cache, in which a sample has, on the average, half of its response.
        """
        self._tokens = tokens
        self._places = np.clip(kv_tokens / (prompt_tokens + tokens / 2), 1, max(slots, 1))
        self._samples = _cumulative(siblings)
        self._prompts = _cumulative(siblings * prompt_tokens)
        self._work = _cumulative(siblings * tokens)
        self._prefill_s = _cumulative(prefill_s)
        self._curves = table.curves(max(slots, 1))
        self._rows: dict[int, np.ndarray] = {}

    def ends(self, first: int) -> np.ndarray:
        """Seconds of prompts ``first`` … ``first + k``, by k, never decreasing, float64[p - first]."""
        if first not in self._rows:
            self._rows[first] = np.maximum.accumulate(self._ends(first))
        return self._rows[first]

    def _ends(self, first: int) -> np.ndarray:
        tokens = self._tokens[first:]
        samples = self._samples[first + 1 :] - self._samples[first]
        prompt = (self._prompts[first + 1 :] - self._prompts[first]) / samples
        below = np.append(tokens[1:], 0.0)
        batch = np.minimum(samples, self._places[first])
        until_next_s = self._seconds(batch, prompt, tokens, below)
        before_s = np.cumsum(until_next_s) - until_next_s
        """Seconds from the end of each prompt to that of the longest, with those that are longer."""
        ends_s = before_s + self._seconds(batch, prompt, tokens, np.zeros(1))
        too_many = int(np.searchsorted(samples, self._places[first], side="right"))
        if too_many < len(tokens):
            ends_s[too_many:] = self._waves(first, too_many, prompt, before_s)
        return ends_s + self._prefill_s[first + 1 :] - self._prefill_s[first]

    def _waves(self, first: int, fit: int, prompt: np.ndarray, before_s: np.ndarray) -> np.ndarray:
        """The same of parts that have more than the first ``fit`` prompts, which are as many as have places."""
        held = max(fit, 1)  # one prompt alone may have more siblings than there are places
        rising = self._tokens[first : first + held][::-1]
        samples = np.diff(self._samples[first : first + held + 1])[::-1]
        room = _cumulative(np.diff(rising) * np.cumsum(samples)[:-1])  # sample-steps left free below each one's end
        places = min(samples.sum(), self._places[first])
        later = self._work[first + fit + 1 :] - self._work[first + held] + (samples.sum() - places) * rising[-1]
        level = np.interp(later, room, rising) + np.maximum(later - room[-1], 0.0) / places
        above_s = np.interp(level, rising, before_s[:held][::-1])
        return above_s + self._seconds(self._places[first : first + 1], prompt[fit:], level, np.zeros(1))

    def _seconds(self, batch: np.ndarray, prompt: np.ndarray, high: np.ndarray, low: np.ndarray) -> np.ndarray:
        """Seconds in which so many samples go from ``low`` to ``high`` tokens each."""
        return (high - low) * self._curves[context_columns(prompt + (high + low) / 2), batch.astype(np.int64)]


def _cumulative(values: np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
