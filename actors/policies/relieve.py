"""Which running samples go to a worker that has nothing to do, while a step waits for its last ones.

This project's own (docs/papers/combined.md). A decode step costs its launches and the reading of the weights, and a
share for each sequence, so a sample is made faster the fewer run beside it. ``balance.py`` (RLBoost) moves what is
above a worker's plateau, for throughput; below it nothing moves, and a machine that had come back from training stood
idle beside engines that ran eighty samples each. In words:

- Those of the oldest open step go, since the trainer waits for them; of them the ones with the most tokens, which are
  most likely to be the longest.
- As many as make all workers equally full, at most; they are dealt out to the idle ones in turn.
- Nobody gives more than makes it as full as all will be: a worker that was stripped would be the next to be relieved.
- Of those with as many tokens, as samples have that were begun together, workers give one each in turn.
- Live, neighbours go together, so that a thousand workers need a thousand orders and not five (``orders``): every idle
  one gets as many as it was dealt, but which ones is the assignment policy's choice once they are back.
- Live, a sample goes only where a decode step is shorter by more than ``GAIN``, as measured (``pays``): its prefill has
  to come from somewhere. Without a measurement nothing is moved, as in ``balance.py``.

Pure: what runs in, moves out. Whoever asks has nothing left to hand out.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

GAIN = 0.05
"""Part of a decode step that a move has to save, each step from then on."""


@dataclass(frozen=True, slots=True)
class Running:
    """Workers with the version in force run these, a column each: they may be tens of thousands."""

    steps: np.ndarray
    """Step of each, int[n]."""
    tokens: np.ndarray
    """Tokens that each has, float or int[n]."""
    sources: np.ndarray
    """Worker that runs each, int[n], numbered from 0."""

    def __len__(self) -> int:
        return len(self.steps)


def decide(running: Running, idle: int, workers: int) -> np.ndarray:
    """int64[m] positions of those that go to the ``idle`` of so many ``workers``, the idle ones among them.

    They are dealt out in turn: the i-th goes to the idle worker ``i % idle``.
    """
    if not len(running) or not idle:
        return np.empty(0, np.int64)
    oldest = np.flatnonzero(running.steps == running.steps.min())
    first = oldest[np.lexsort((_turns(running.sources[oldest]), -running.tokens[oldest]))]
    givers = running.sources[first]
    too_many = np.bincount(running.sources) - len(running) // workers
    first = first[_turns(givers) < too_many[givers]]
    return first[: len(running) * idle // workers]


def _turns(sources: np.ndarray) -> np.ndarray:
    """int64[n] how many of the same source stand before each."""
    by_source = np.argsort(sources, kind="stable")
    counts = np.bincount(sources)
    turn = np.empty(len(sources), np.int64)
    turn[by_source] = np.arange(len(sources)) - np.repeat(np.cumsum(counts) - counts, counts)
    return turn


def orders(sources: np.ndarray, idle: int) -> list[tuple[int, int, np.ndarray]]:
    """(Source, idle worker, positions in ``sources``): fewer than there are sources and targets.

    ``sources``: int[m] who runs each of those that go.
    """
    by_source = np.argsort(sources, kind="stable")
    source, target = sources[by_source], np.sort(np.arange(len(sources)) % idle)
    starts = np.flatnonzero(np.diff(source, prepend=-1) | np.diff(target, prepend=-1)).tolist()
    spans = itertools.pairwise([*starts, len(sources)])
    return [(int(source[start]), int(target[start]), by_source[start:end]) for start, end in spans]


def pays(step_s: float, step_there_s: float) -> bool:
    """Whether a sample is made enough faster where a decode step takes ``step_there_s``; NaN: not measured, so no."""
    return step_there_s < (1 - GAIN) * step_s
