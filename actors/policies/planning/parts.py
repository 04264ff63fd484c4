"""Which neighbours of a step's prompts, sorted by expected length, make up the part of each worker.

    longest ─────────────────────────────────────────── shortest
    even       │    part 0    │    part 1    │    part 2    │     equal numbers of prompts (RLHFless, arXiv 2602.22718)
    balanced   │p0│   part 1   │           part 2            │     all end with part 0, as predicted; this project's own

With equal numbers the part of the longest prompts is as full as the others, so it decodes as slowly, for longer: the
step waits for it. Balanced gives the first worker so few prompts that the others, each filled until it would end no
later, just hold the rest. Since part 0 ends last, it hides the time that the others wait before they begin (B.7).

Invariants
- Every prompt is in exactly one part, and parts are consecutive.
- No other parts of these workers in this order would end earlier than ``balanced``, up to the time of one prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from actors.policies.assigning.latency_table import LatencyTable, context_columns


class PartEnds:
    """Tells when parts end, for one table and one number of places. Each first prompt is computed once, if asked for.

    All samples of a part begin at once and each decode step gives one token to each, so between two ends the batch is
    constant: seconds = Σ steps between two ends · step_s(batch, context). All parts that begin with the same prompt
    differ in their last term only, so one cumulative sum has them all. What ``generation_time`` replays, event by
    event, this adds up for hundreds of parts in a millisecond.

    A part with more samples than places keeps all places full up to the level to which its later samples fill the
    places that its first ones leave early; above it the first ones end as if alone. The replay differs a little, since
    it does not pour one sample into several places.
    """

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

        ``kv_tokens``: size of the worker's cache, where a sample has half of its response on average.
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
        """Seconds that prompts ``first`` … ``first + k`` take, by k, never decreasing, float64[p - first]."""
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
        """Seconds from the end of each prompt to that of the longest, while only longer ones run."""
        ends_s = before_s + self._seconds(batch, prompt, tokens, np.zeros(1))
        too_many = int(np.searchsorted(samples, self._places[first], side="right"))
        if too_many < len(tokens):
            ends_s[too_many:] = self._waves(first, too_many, prompt, before_s)
        return ends_s + self._prefill_s[first + 1 :] - self._prefill_s[first]

    def _waves(self, first: int, fit: int, prompt: np.ndarray, before_s: np.ndarray) -> np.ndarray:
        """As ``_ends``, less prefill, for parts of more prompts than the first ``fit``, which all have places."""
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


class Pace(NamedTuple):
    """Tells when a worker ends, by the prompts that it is given."""

    ends: PartEnds
    factor: float = 1.0
    """Factor by which the worker is slower than the table of ``ends``."""
    after_s: float = 0.0
    """Seconds until the worker can begin."""

    def end_s(self, first: int, beyond: int) -> float:
        """Seconds until the worker ends with these prompts; 0 for none: it is not needed."""
        return self.after_s + self.factor * float(self.ends.ends(first)[beyond - first - 1]) if beyond > first else 0.0

    def beyond(self, first: int, until_s: float) -> int:
        """Position behind the last prompt with which the worker ends by ``until_s``."""
        given_s = (until_s - self.after_s) / self.factor
        return first + int(np.searchsorted(self.ends.ends(first), given_s * (1 + 1e-12), side="right"))


def even(prompts: int, workers: int) -> list[int]:
    """Where each part ends; there are no more workers than prompts."""
    return [prompts * (i + 1) // workers for i in range(workers)]


def balanced(prompts: int, workers: Sequence[Pace]) -> list[int]:
    """Where the part of each of these workers ends; one that would not be in time gets nothing."""
    least, most = 1, prompts
    while least < most:  # part 0 of this many prompts says by when the others must end
        first = (least + most) // 2
        if _filled(prompts, workers, first)[-1] == prompts:
            most = first
        else:
            least = first + 1
    return _filled(prompts, workers, least)


def _filled(prompts: int, workers: Sequence[Pace], first: int) -> list[int]:
    """As ``balanced``, with so many prompts in part 0; the last end is before ``prompts`` where they do not fit."""
    until_s, ends = workers[0].end_s(0, first), [first]
    for worker in workers[1:]:
        ends.append(worker.beyond(ends[-1], until_s) if ends[-1] < prompts else prompts)
    return ends
