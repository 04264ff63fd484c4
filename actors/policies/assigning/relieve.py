"""Which running samples go to a worker that has nothing to do, while a step waits for its last ones.

This project's own (docs/papers/combined.md). A decode step costs its launches and the reading of the weights, and a
share for each sequence, so a sample is generated faster the fewer run beside it. ``balance.py`` (RLBoost) moves what is
above a worker's plateau, for throughput. Below the plateau it moves nothing, so that a machine back from training would
stand idle beside engines that run many samples each. In words:

- Samples of the oldest open step go, since the trainer waits for them; of these the ones with the most tokens, which
  are most likely to be the longest.
- At most as many go as make all workers equally full; they are dealt out to the idle workers in turn.
- No worker gives so many that it has fewer than the others: it would be the next to be relieved.
- Of samples with equally many tokens, as when they were begun together, each worker gives one in turn.
- Live, samples of a worker go together (``orders``), so that there are few orders: each idle worker gets as many as it
  was dealt, but the assignment policy chooses which, once they are back.
- Live, a sample goes only where a decode step is shorter by more than ``GAIN``, as measured (``pays``), since it costs
  a prefill. Without a measurement nothing is moved, as in ``balance.py``.

Pure: what runs in, moves out. To be asked when nothing is left to hand out.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

GAIN = 0.05
"""Part of a decode step that a move has to save, each step from then on."""


@dataclass(frozen=True, slots=True)
class Running:
    """Holds, in columns, the samples that workers with the version in force run: maybe tens of thousands."""

    steps: np.ndarray
    """Step of each sample, int[n]."""
    tokens: np.ndarray
    """Tokens that each has, float or int[n]."""
    sources: np.ndarray
    """Worker that runs each, int[n], numbered from 0."""

    def __len__(self) -> int:
        return len(self.steps)


def decide(running: Running, idle: int, workers: int) -> np.ndarray:
    """int64[m] positions of the samples that go to the ``idle`` ones among so many ``workers``.

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
    """int64[n] how many entries of the same source stand before each."""
    by_source = np.argsort(sources, kind="stable")
    counts = np.bincount(sources)
    turn = np.empty(len(sources), np.int64)
    turn[by_source] = np.arange(len(sources)) - np.repeat(np.cumsum(counts) - counts, counts)
    return turn


def orders(sources: np.ndarray, idle: int) -> list[tuple[int, int, np.ndarray]]:
    """(Source, idle worker, positions in ``sources``) of each order: fewer than sources and targets together.

    ``sources``: int[m] worker that runs each sample that goes.
    """
    by_source = np.argsort(sources, kind="stable")
    source, target = sources[by_source], np.sort(np.arange(len(sources)) % idle)
    starts = np.flatnonzero(np.diff(source, prepend=-1) | np.diff(target, prepend=-1)).tolist()
    spans = itertools.pairwise([*starts, len(sources)])
    return [(int(source[start]), int(target[start]), by_source[start:end]) for start, end in spans]


def pays(step_s: float, step_there_s: float) -> bool:
    """Whether a move pays from a step of ``step_s`` to one of ``step_there_s``; NaN, not measured: no."""
    return step_there_s < (1 - GAIN) * step_s
