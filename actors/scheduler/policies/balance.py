"""Which worker a sample goes to, and which samples leave a worker that has too many for one that has too few.

RLBoost (arXiv 2510.19225) section "live request tracking and migration", Algorithm 2. In words:

- **Capped join-shortest-queue** (``shortest``): a sample goes to the worker with the fewest pending ones, and to nobody
  whose queue has reached the cap. What is held back can still go anywhere when a worker comes.
- **Pending** (``decide``): while one worker has nothing pending and room to run more, and another has something
  pending, samples move from the longest queue, one by one. They have no cache, so moving them costs nothing.
- **Running**: else, if a worker runs nothing at all, the fullest one gives up what it runs above its *plateau*, the
  batch beyond which its throughput hardly grows: they cost it nothing, and one prefill each elsewhere.
- **Plateau table**: throughput by batch size, measured by the workers themselves during the step before this one.
  Without a measurement nothing that runs is moved.

Pure: queues in, moves out. Ties go to the first in the order of the view.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

PLATEAU_GAIN = 0.05
"""A batch is on the plateau when no larger one gave more than this above its throughput."""


@dataclass(frozen=True, slots=True)
class QueueView:
    """One worker that serves the version in force."""

    name: str
    pending: int
    """Given to it and not begun."""
    executing: int
    slots: int
    """What it runs at once at most."""
    plateau: int | None = None
    """See the module's docstring; None: not measured yet."""


@dataclass(frozen=True, slots=True)
class Move:
    """``count`` samples from one worker to another; of those that run, the ones that hold the fewest tokens."""

    source: str
    target: str
    count: int
    running: bool = False


def shortest(workers: Iterable[QueueView], cap: int) -> str | None:
    """The worker with the shortest queue below ``cap``, of those the one that runs least; None: hold it back."""
    open_ = [worker for worker in workers if worker.pending < cap]
    return min(open_, key=lambda w: (w.pending, w.executing / w.slots)).name if open_ else None


def decide(workers: Sequence[QueueView], now: float = 0.0) -> list[Move]:
    """All moves that the rules ask for at once. ``now`` is not looked at: queues say it all."""
    pending = _move_pending(workers)
    return pending or _move_running(workers)


def _move_pending(workers: Sequence[QueueView]) -> list[Move]:
    queue = {w.name: w.pending for w in workers}
    room = {w.name: w.slots - w.executing for w in workers if not w.pending and w.executing < w.slots}
    moved: dict[tuple[str, str], int] = {}
    while room:
        source = max(queue, key=lambda name: queue[name])
        if not queue[source]:
            break
        target = max(room, key=lambda name: room[name])
        queue[source] -= 1
        room[target] -= 1
        moved[source, target] = moved.get((source, target), 0) + 1
        if not room[target]:
            del room[target]
    return [Move(source, target, count) for (source, target), count in moved.items()]


def _move_running(workers: Sequence[QueueView]) -> list[Move]:
    moves: list[Move] = []
    left = {w.name: w for w in workers}
    for idle in workers:
        if idle.executing or idle.pending:
            continue
        fullest = max(left.values(), key=lambda w: w.executing)
        if fullest.plateau is None:
            continue
        count = min(fullest.executing - fullest.plateau, idle.slots)
        if count <= 0:
            break
        moves.append(Move(fullest.name, idle.name, count, running=True))
        left[fullest.name] = replace(fullest, executing=fullest.executing - count)
    return moves


def plateau(throughput: Mapping[int, float], gain: float = PLATEAU_GAIN) -> int | None:
    """The smallest batch of a table ``batch → tokens/s`` that no larger one beats by more than ``gain``.

    None: the table tells nothing, because its largest batch is still where it grows. One point is no table.
    """
    batches = sorted(throughput)
    for at, batch in enumerate(batches[:-1]):
        if max(throughput[larger] for larger in batches[at + 1 :]) <= (1 + gain) * throughput[batch]:
            return batch
    return None
