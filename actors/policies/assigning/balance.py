"""Which samples leave a worker that has too many for one that has too few.

RLBoost (arXiv 2510.19225) section "live request tracking and migration", Algorithm 2. In words:

- **Pending**: while one worker has nothing pending and room to run more, and another has something pending, samples
  move from the longest queue, one by one. They have no cache, so moving them costs nothing.
- **Running**: else, if a worker runs nothing at all, the fullest one gives up what it runs above its *plateau*, the
  batch beyond which its throughput hardly grows: it loses nothing, and each sample costs one prefill elsewhere.
- **Plateau table**: throughput by batch size, measured by the workers themselves during the step before this one.
  Without a measurement nothing that runs is moved.

Pure: queues in, moves out. Ties go to the first in the order of the view.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PLATEAU_GAIN = 0.05
"""Part of a batch's throughput that a larger batch has to gain; else the batch is on the plateau."""


@dataclass(frozen=True, slots=True)
class QueueView:
    """Describes a worker that serves the version in force."""

    name: str
    pending: int
    """Samples that the worker was given and has not begun."""
    executing: int
    slots: int
    """Samples that the worker runs at once at most."""
    plateau: int | None = None
    """Batch beyond which its throughput hardly grows; None: not measured yet."""


@dataclass(frozen=True, slots=True)
class Move:
    """Moves ``count`` samples from one worker to another; of running ones, those that hold the fewest tokens."""

    source: str
    target: str
    count: int
    running: bool = False


def decide(workers: Sequence[QueueView]) -> list[Move]:
    """All moves that the rules ask for at once."""
    return _move_pending(workers) or _move_running(workers)


def _move_pending(workers: Sequence[QueueView]) -> list[Move]:
    """Move samples one by one, at O(log workers) each."""
    longest = [(-w.pending, i) for i, w in enumerate(workers) if w.pending]
    roomiest = [(w.executing - w.slots, i) for i, w in enumerate(workers) if not w.pending and w.executing < w.slots]
    heapq.heapify(longest)
    heapq.heapify(roomiest)
    moved: dict[tuple[int, int], int] = {}
    while longest and roomiest:
        source, target = _take_one(longest), _take_one(roomiest)
        moved[source, target] = moved.get((source, target), 0) + 1
    return [Move(workers[source].name, workers[target].name, count) for (source, target), count in moved.items()]


def _take_one(heap: list[tuple[int, int]]) -> int:
    """Count one less for the worker on top, which goes from the heap at 0; counts are negative. Returns the worker."""
    count, i = heap[0]
    if count < -1:
        heapq.heapreplace(heap, (count + 1, i))
    else:
        heapq.heappop(heap)
    return i


def _move_running(workers: Sequence[QueueView]) -> list[Move]:
    moves: list[Move] = []
    fullest = [(-w.executing, i) for i, w in enumerate(workers)]
    heapq.heapify(fullest)
    for idle in workers:
        if idle.executing or idle.pending:
            continue
        executing, i = fullest[0]
        source = workers[i]
        count = 0 if source.plateau is None else min(-executing - source.plateau, idle.slots)
        if count <= 0:
            break
        moves.append(Move(source.name, idle.name, count, running=True))
        heapq.heapreplace(fullest, (executing + count, i))
    return moves


def plateau(throughput: Mapping[int, float], gain: float = PLATEAU_GAIN) -> int | None:
    """The smallest batch of a table ``batch → tokens/s`` that no larger one beats by more than ``gain``.

    None: throughput still grows at the largest batch, or only one batch was measured.
    """
    batches = sorted(throughput)
    for at, batch in enumerate(batches[:-1]):
        if max(throughput[larger] for larger in batches[at + 1 :]) <= (1 + gain) * throughput[batch]:
            return batch
    return None
