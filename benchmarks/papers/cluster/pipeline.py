"""Iterations of generation and training, in the modes that StreamRL compares.

    mode               the trainer takes                 generation of batch k begins when             weights move
    colocated          the whole batch, on all devices   batch k-1 is trained and the stage switched   in place
    minibatch          a quarter of the batch each time  version k has arrived                         between
    dynamic            what has arrived, once enough     version k has arrived                         between
    one_step_barrier   the batch generated before        all stand still: the barrier                  at the barrier
    async              what has arrived, once enough     batch k-1 is generated, version k-1 arrived   meanwhile

Pure arithmetic on finish times; a batch of n samples costs O(n log n).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Mode = Literal["colocated", "minibatch", "dynamic", "one_step_barrier", "async"]
_CHUNKS = 4
"""Mini-batches in an iteration of the mode ``minibatch``."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch is one iteration's samples."""

    finished_s: np.ndarray
    """Seconds after generation began, float64[n]."""
    train_s: np.ndarray
    """Seconds that each sample takes the trainer, float64[n]."""


@dataclass(frozen=True, slots=True)
class Stages:
    """Stages cost this besides the samples."""

    transfer_s: float = 0.0
    """Seconds in which weights go from the trainer to all instances."""
    switch_s: float = 0.0
    """Seconds between the stages of ``colocated``, both ways together."""
    step_s: float = 0.0
    """Seconds of the optimizers."""
    saturating_s: float = 0.0
    """Seconds that a micro-batch takes at least; the trainer waits for as much work."""


def iteration_s(mode: Mode, batches: Sequence[Batch], stages: Stages, *, warm_up: int = 2) -> float:
    """Mean time of an iteration, without the first ``warm_up``."""
    ends = _RUN[mode](batches, stages)
    return (ends[-1] - ends[warm_up - 1]) / (len(ends) - warm_up) if warm_up else ends[-1] / len(ends)


def train_arrivals_s(arrivals_s: np.ndarray, train_s: np.ndarray, free_s: float, *, least_s: float) -> float:
    """When a trainer that is free at ``free_s`` has trained all, dynamically: whatever is there, once it is enough.

    Enough is work for ``least_s``, which a smaller micro-batch takes as well, or all that is left.
    """
    order = np.argsort(arrivals_s, kind="stable")
    arrived, work = arrivals_s[order], np.concatenate([[0.0], np.cumsum(train_s[order])])
    now_s, taken = free_s, 0
    while taken < len(arrived):
        there = max(taken, int(np.searchsorted(arrived, now_s, side="right")))
        while there < len(arrived) and (there == taken or work[there] - work[taken] < least_s):
            now_s = max(now_s, float(arrived[there]))
            there += 1
        now_s += max(float(work[there] - work[taken]), least_s)
        taken = there
    return now_s


def train_chunks_s(arrivals_s: np.ndarray, train_s: np.ndarray, free_s: float, *, chunks: int) -> float:
    """The same for fixed mini-batches in order of arrival, each of which begins once it is full."""
    now_s = free_s
    for chunk in np.array_split(np.argsort(arrivals_s, kind="stable"), chunks):
        if len(chunk):
            now_s = max(now_s, float(arrivals_s[chunk[-1]])) + float(train_s[chunk].sum())
    return now_s


def _colocated(batches: Sequence[Batch], stages: Stages) -> list[float]:
    times = [float(b.finished_s.max() + b.train_s.sum()) + stages.switch_s + stages.step_s for b in batches]
    return np.cumsum(times).tolist()


def _streamed(batches: Sequence[Batch], stages: Stages, *, ahead: int, chunks: int = 0) -> list[float]:
    """``ahead``: how many versions older than its own step's a batch may be generated with."""
    generated_s, trained = 0.0, list[float]()
    for k, batch in enumerate(batches):
        version = k - 1 - ahead
        begin_s = max(generated_s, trained[version] + stages.transfer_s if version >= 0 else 0.0)
        arrivals = begin_s + batch.finished_s
        generated_s, free_s = float(arrivals.max()), trained[-1] if trained else 0.0
        if chunks:
            end_s = train_chunks_s(arrivals, batch.train_s, free_s, chunks=chunks)
        else:
            end_s = train_arrivals_s(arrivals, batch.train_s, free_s, least_s=stages.saturating_s)
        trained.append(end_s + stages.step_s)
    return trained


def _barrier(batches: Sequence[Batch], stages: Stages) -> list[float]:
    now_s, ends = float(batches[0].finished_s.max()), list[float]()
    for batch, following in itertools.pairwise(batches):
        training_s = float(batch.train_s.sum()) + stages.step_s
        now_s += max(training_s, float(following.finished_s.max())) + stages.transfer_s
        ends.append(now_s)
    return ends


_RUN: dict[Mode, Callable[[Sequence[Batch], Stages], list[float]]] = {
    "colocated": _colocated,
    "minibatch": lambda batches, stages: _streamed(batches, stages, ahead=0, chunks=_CHUNKS),
    "dynamic": lambda batches, stages: _streamed(batches, stages, ahead=0),
    "one_step_barrier": _barrier,
    "async": lambda batches, stages: _streamed(batches, stages, ahead=1),
}
