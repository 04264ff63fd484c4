"""When machines that both generate and train stop generating: as soon as the trainer would not have to wait.

RLBoost's window (``offload``) is learned from step to step, and therefore late whenever machines come or go or lengths
drift. This rule looks ahead instead:

- The trainer trains whole groups as they are finished. Of a sample whose siblings are unfinished, it can meanwhile do
  the part that needs no advantage (log-probabilities, StreamRL 1.3). If it began now, and all other workers generated
  the rest, it would stand still for ``wait_s`` in all. If that is negative, the groups arrive that long before it needs
  them.
- While the trainer waits, its engines could generate at no cost. So they generate until it would not wait, and hand
  over then. With enough other workers that is when the first groups are finished; with none it is when all are, which
  is plain colocation.
- A trainer with nothing left to train (workers were lost, estimates were wrong) switches back to generating if its wait
  is longer than switching over and back takes, with a margin. If samples of later steps wait for a place, its engines
  are useful for all of that time. If none do, only the time counts by which they would shorten the wait: they would
  take waiting samples, and a share of the running ones, whose decode steps are shorter in smaller batches
  (``relieve``).

``wait_s`` comes from a short event simulation with the workers' measured pace: each running sample gets one token per
decode step, the step's time depends on the batch, and waiting samples take places that become free, in order. Ranked
lengths are enough; a wrong estimate costs a wait, never a sample.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from actors.policies.assigning.generation_time import StepTime

MARGIN = 3.0
"""Factor by which a wait must be longer than switching over and back, for a trainer to switch back."""
OUTLIVED = 0.1
"""Fraction of its tokens that a sample is expected to need in addition, once it is longer than expected."""


class Left(NamedTuple):
    """One unfinished sample is described by this."""

    tokens: float
    """Tokens that it is expected to need still."""
    group: int
    """Index of its group in the step; negative for a sample of another step."""
    cache_tokens: float
    """Tokens of a worker's cache that it occupies until then, on average."""
    early_s: float = 0.0
    """Seconds of its training that need not wait for its group."""


@dataclass(frozen=True, slots=True)
class HandOverView:
    """The view describes what is left of the step that is trained next."""

    ready_s: float
    """Seconds of training that can be done now: complete groups, and parts of samples that wait for their group."""
    running: Sequence[Left]
    """Samples that other workers run, including those of other steps, which take room as well."""
    queued: Sequence[Left]
    """Other samples of the step in the order in which they would begin: the trainer's own go first."""
    train_s: dict[int, float]
    """Group → seconds of its training that can begin only when the group is complete."""
    workers: float
    """Number of other workers; a fraction if a part of a large fleet stands for all of it."""
    places: float
    """Number of samples that one other worker runs at once, on average."""
    cache_tokens: float
    """Tokens that the cache of one other worker holds."""
    pace: StepTime
    begin_s: float = 0.0
    """Seconds until the first of the other workers begins."""
    more_waits: bool = False
    """Whether samples of later steps wait for a place."""
    helpers: float = 0.0
    """Number of workers that the trainer's own engines would add if they generated."""


def left_tokens(expected: float, has: float, longest: float) -> float:
    """Tokens that a sample with ``has`` tokens is expected to need still; none becomes longer than ``longest``."""
    return max(min(max(expected - has, OUTLIVED * max(expected, has)), longest - has), 1.0)


def wait_s(view: HandOverView) -> float:
    """Seconds that the trainer would stand still if it began now; negative if it has time to spare.

    ``inf``: samples have to be generated, and there is no other worker.
    """
    if not view.train_s:
        return -math.inf
    if not view.workers:
        return math.inf
    return waited_s(view.ready_s, _comes(view))


def waited_s(ready_s: float, comes: Iterable[tuple[float, float]]) -> float:
    """Like ``wait_s``, for pairs of (arrival time, training time) in seconds from now; ``ready_s`` is there already."""
    waited_s, trained_s = -math.inf, ready_s
    for at_s, train_s in sorted(comes):
        waited_s = max(waited_s, at_s - trained_s)
        trained_s += train_s
    return waited_s


def _comes(view: HandOverView) -> list[tuple[float, float]]:
    """(Arrival time, training time) of each part that can be trained early, and of each completed group.

    All workers are treated as one large worker, with the samples shared evenly.
    """
    workers = view.workers
    complete_s, early = dict.fromkeys(view.train_s, 0.0), list[tuple[float, float]]()
    active = list(view.running)  # by the token at which they end
    heapq.heapify(active)
    cached = sum(one.cache_tokens for one in active)
    waiting = iter(view.queued)
    upcoming = next(waiting, None)
    now_s, token = view.begin_s, 0.0
    while active or upcoming:
        while upcoming and (
            not active
            or (len(active) < workers * view.places and cached + upcoming.cache_tokens <= workers * view.cache_tokens)
        ):
            heapq.heappush(active, upcoming._replace(tokens=token + upcoming.tokens))
            cached += upcoming.cache_tokens
            upcoming = next(waiting, None)
        batch = len(active)
        done = heapq.heappop(active)
        now_s += (done.tokens - token) * view.pace.step_s(max(1.0, batch / workers), cached / batch)
        token, cached = done.tokens, cached - done.cache_tokens
        if done.group in complete_s:
            complete_s[done.group] = now_s
            if done.early_s:
                early.append((now_s, done.early_s))
    return early + [(end_s, view.train_s[group]) for group, end_s in complete_s.items()]


def should_train(view: HandOverView) -> bool:
    """Whether the trainer's engines should hand over now, since the trainer would not wait."""
    return wait_s(view) <= 0


def should_return(view: HandOverView, *, switch_s: float) -> bool:
    """Whether a trainer with nothing left to train should generate again; ``switch_s``: time of one switch."""
    alone_s, least_s = wait_s(view), MARGIN * 2 * switch_s
    if view.more_waits and view.helpers:
        return alone_s > least_s
    helped = replace(view, workers=view.workers + view.helpers, begin_s=0.0 if view.helpers else view.begin_s)
    return alone_s - max(0.0, wait_s(helped)) > least_s
