"""When machines that both generate and train stop generating: as soon as the trainer would not have to wait.

Goes beyond RLBoost's window (``offload``), which is learned from step to step and therefore late whenever machines come
or go or lengths drift. In words:

- The trainer works through whole groups as they are finished; of a sample whose siblings are not, it does meanwhile
  what needs no advantage (log-probabilities, StreamRL 1.3). If it began now, and all the other workers generated what
  is left, it would stand still for ``wait_s`` in all; below zero: so long before it needs them the groups are there.
- Every second of waiting is one in which its engines could have generated, for nothing. So they generate on until it
  would not wait, and hand over then. With enough other workers that is when the first groups are finished; with none
  it is when everything is: plain colocation.
- A trainer that runs dry all the same (workers were lost, estimates were wrong) goes back to generating for a wait that
  is longer than changing over and back takes, with a margin. Where samples of later steps wait for a place its engines
  are of use for all of that time. Where none do the wait counts as far as they would shorten it: they would take what
  waits, and their share of what runs, whose steps are shorter with fewer beside it (``relieve``).

``wait_s`` comes from a short event simulation over the workers' own pace: all that run get a token a step, a step takes
what the batch says, what waits takes the places that become free, in order. Ranked lengths are enough; a wrong estimate
costs a wait, never a sample.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from actors.policies.generation_time import StepTime

MARGIN = 3.0
"""Factor by which a wait has to be longer than changing over and back, for a trainer to switch back."""
OUTLIVED = 0.1
"""Part of its tokens that a sample is taken to need again once it has more of them than were expected."""


class Left(NamedTuple):
    """It is one unfinished sample."""

    tokens: float
    """Tokens that it still needs, as expected."""
    group: int
    """Group of the step; a negative one: of another step."""
    cache_tokens: float
    """Tokens that it takes of a worker's cache meanwhile, on average."""
    early_s: float = 0.0
    """Seconds of its training that need not wait for its group."""


@dataclass(frozen=True, slots=True)
class HandOverView:
    """It shows what is left of the step that is trained next."""

    ready_s: float
    """Seconds of training that has arrived, and of what can be done of samples that wait for their group."""
    running: Sequence[Left]
    """Samples that other workers run, those of other steps too: they take room all the same."""
    queued: Sequence[Left]
    """Other samples of the step in the order in which they would begin: the trainer's own go first."""
    train_s: dict[int, float]
    """Seconds of training of each incomplete group, beyond what is done or can be done without it."""
    workers: float
    """Number of other workers; a fraction where a part of a large fleet stands for all of it."""
    places: float
    """Samples that one of them runs at once, on average."""
    cache_tokens: float
    """Tokens that the cache of one of them holds."""
    pace: StepTime
    begin_s: float = 0.0
    """Seconds until the first of the other workers begins."""
    more_waits: bool = False
    """Whether samples of later steps wait for a place."""
    helpers: float = 0.0
    """Workers that there would be beside them if the trainer's own engines generated."""


def left_tokens(expected: float, has: float, longest: float) -> float:
    """Tokens that a sample with ``has`` of them still needs, as expected; none becomes longer than ``longest``."""
    return max(min(max(expected - has, OUTLIVED * max(expected, has)), longest - has), 1.0)


def wait_s(view: HandOverView) -> float:
    """How long the trainer would stand still if it began now, less than nothing if it has time to spare.

    ``inf``: somebody has to generate, and nobody else is there.
    """
    if not view.train_s:
        return -math.inf
    if not view.workers:
        return math.inf
    return waited_s(view.ready_s, _comes(view))


def waited_s(ready_s: float, comes: Iterable[tuple[float, float]]) -> float:
    """The same for pairs of (when it comes, training), in seconds since it began; ``ready_s`` was there then."""
    waited_s, trained_s = -math.inf, ready_s
    for at_s, train_s in sorted(comes):
        waited_s = max(waited_s, at_s - trained_s)
        trained_s += train_s
    return waited_s


def _comes(view: HandOverView) -> list[tuple[float, float]]:
    """(When, training) that comes with a sample, or with the last one of a group.

    Workers count as one large one whose samples are evenly shared.
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
    """Whether the trainer's engines are to hand over now."""
    return wait_s(view) <= 0


def should_return(view: HandOverView, *, switch_s: float) -> bool:
    """Whether a trainer that has not enough to train is to generate again; ``switch_s`` is one change."""
    alone_s, least_s = wait_s(view), MARGIN * 2 * switch_s
    if view.more_waits and view.helpers:
        return alone_s > least_s
    helped = replace(view, workers=view.workers + view.helpers, begin_s=0.0 if view.helpers else view.begin_s)
    return alone_s - max(0.0, wait_s(helped)) > least_s
