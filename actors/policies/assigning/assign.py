"""Which worker generates which samples: join the shortest queue, by credit.

Invariants
- A worker never holds more samples than it has slots, nor generates a sample of step s with a version < s - k.
- A sample never goes on with an older version than its tokens are of.
- Moved samples go first, then older steps, then the longest as predicted, then prompts in order: what others wait for
  comes before what can wait.
- A suspect, a prompt that an engine held when it crashed, is given whole to a worker that holds no other suspect: if
  that worker crashes too, the cause is known.
- Groups that are kept for certain, dedicated workers (``dispatch_long``) go to those. They go to other workers only
  when all of their own are gone, or when the others have room and none of the step's other groups is left. Other groups
  go to a dedicated worker only when all other workers are gone, or when it holds nothing and no group of another step
  is kept for it; as a step is issued whole, its kept groups have been handed out by then.
- Parts of a planned step (``AssignView.keeps_parts``) wait for their workers, and go to any once those are gone.
- A group that holds tokens, or is a suspect, goes to any worker that serves its version if its own have no room.
- Siblings stay together, so that their prompt is prefilled once, unless that would leave another worker short: a group
  goes to the first of the shortest queues that has room for all of it. Where none has, it is split over the fewest.
- A turn of an episode goes to the worker that had the turn before, whose prefix cache has most of its context, unless
  that worker is much fuller than others.
- The shortest queue is that with the fewest samples that could not begin, then the one that is least full. The view
  decides how many may wait at a worker: ``slots`` is the cap.

A worker that is loading the version that a step needs gets its share ahead, for ``pull_patience_s``: it holds the work
and begins as soon as it has loaded, without a message back and forth in between. Moved samples go to a worker that
serves already, where there is one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from actors.policies.assigning.view import AssignView, GroupView, WorkerView
from actors.policies.lengths.length_predictor import longest_first

_LOOKS: Final = 8
"""Number of workers that are looked at for one with room for a whole group. A round may have a thousand workers with
one place each, and as many groups."""

_FULLER: Final = 0.25
"""Part of its slots by which a worker that has computed a context may be fuller than the emptiest one and still get the
next turn: computing a context again takes longer than decode steps with a quarter more sequences."""


@dataclass(frozen=True, slots=True)
class AssignSamples:
    """``rows`` of ``step`` are to be handed to ``worker`` in one message."""

    worker: str
    step: int
    rows: np.ndarray  # int32[n]


def decide(view: AssignView, now: float) -> list[AssignSamples]:
    """Assign as many queued samples as credit allows."""
    given = _Given(view)
    for step in _steps(view):
        groups = [g for g in view.groups if g.step == step]
        ready = [w for w in view.workers if w.policy_version >= step - view.max_staleness]
        there = _There(ready, ready + _soon_ready(view, step, now))
        if there.able and view.keeps_parts:
            for part in _parts(groups, there):
                _place_lane(part, there, given)
        elif there.able:
            long, others = (_place_lane(lane, there, given) for lane in _lanes(groups))
            if others:
                _place(others, _idle_of_the_dedicated(others, view, given, there), given)
            else:
                _place(long, there.but(long[0].kept_for if long else frozenset()), given)
    return _cut(given.picks, view.message_samples)


@dataclass(frozen=True, slots=True)
class _There:
    """Lists the workers that may generate samples of a step."""

    ready: list[WorkerView]
    """Workers that serve a version that is new enough."""
    able: list[WorkerView]
    """Workers of ``ready``, then those that are loading such a version."""

    def among(self, names: frozenset[str]) -> _There:
        return _There([w for w in self.ready if w.name in names], [w for w in self.able if w.name in names])

    def but(self, names: frozenset[str]) -> _There:
        return _There([w for w in self.ready if w.name not in names], [w for w in self.able if w.name not in names])


class _Given:
    """Counts what each worker has been given so far in this round."""

    def __init__(self, view: AssignView) -> None:
        self.room = {w.name: w.slots - w.in_flight for w in view.workers}
        self.load = {w.name: w.in_flight for w in view.workers}
        self.picks: dict[tuple[str, int], list[np.ndarray]] = {}
        self.taken = {w.name for w in view.workers if w.has_suspect}

    def give(self, worker: str, step: int, rows: np.ndarray) -> None:
        self.picks.setdefault((worker, step), []).append(rows)
        self.room[worker] -= len(rows)
        self.load[worker] += len(rows)


def _lanes(groups: list[GroupView]) -> list[list[GroupView]]:
    """The groups that are kept for certain workers, and the others; each list in the order in which it is placed."""
    kept = [g for g in groups if g.kept_for]
    return [_in_order(lane) for lane in (kept, [g for g in groups if not g.kept_for])]


def _parts(groups: list[GroupView], there: _There) -> list[list[GroupView]]:
    """Groups by the workers that they are kept for: moved ones first, those whose workers are gone after others."""
    names = {worker.name for worker in there.able}
    parts: dict[tuple[bool, bool, frozenset[str]], list[GroupView]] = {}
    for group in groups:
        parts.setdefault((not group.moved, group.kept_for.isdisjoint(names), group.kept_for), []).append(group)
    return [_in_order(parts[key]) for key in sorted(parts, key=lambda key: key[:2])]


def _in_order(groups: list[GroupView]) -> list[GroupView]:
    """Moved groups, then the longest; an unknown length counts as the median. Ties keep the order of prompts."""
    expected = np.array([g.expected_tokens for g in groups])
    known = expected[np.isfinite(expected)]
    filled = np.where(np.isnan(expected), np.median(known) if len(known) else 0.0, expected)
    return sorted((groups[i] for i in longest_first(filled)), key=lambda g: not g.moved)


def _place_lane(groups: list[GroupView], there: _There, given: _Given) -> list[GroupView]:
    """Place groups on the workers of their lane; returns what is left of those that nobody has begun."""
    if not groups:
        return []
    kept_for, not_for = groups[0].kept_for, groups[0].not_for
    own = there.among(kept_for) if kept_for else there.but(not_for)
    if not own.able:  # all of them are gone: anybody may
        return _place(groups, there, given)
    return _place(groups, own, given, (there.but(kept_for) if kept_for else there.among(not_for)).ready)


def _place(groups: list[GroupView], there: _There, given: _Given, beyond: Sequence[WorkerView] = ()) -> list[GroupView]:
    """Place groups on workers of ``there``, begun ones on those ``beyond`` too; returns what is left of the others."""
    ready, able = there.ready, there.able
    if not groups or not able:
        return groups
    share = _share(groups, given.load, able)
    anybody, at_once = _Shortest(able, share, given), _Shortest(ready or able, share, given)
    left: list[GroupView] = []
    for group in groups:
        if group.suspect or group.version >= 0:
            _place_begun(group, (ready, beyond), given)
            continue
        rows = (at_once if group.moved else anybody).place(group)
        if len(rows):
            left.append(group if len(rows) == len(group.rows) else group.part(rows))
    return left


def _place_begun(group: GroupView, pools: tuple[Sequence[WorkerView], ...], given: _Given) -> None:
    """Give a group that holds tokens, or a suspect, to workers that serve its version, in the order of ``pools``."""
    for pool in pools:
        serving = [w for w in pool if w.policy_version >= group.version]
        if group.suspect:
            if _place_alone(group, serving, given):
                return
        elif own := _last_of(group, serving, given):
            given.give(own, group.step, group.rows)
            return
        elif serving and len(group.rows):
            level = _share([group], given.load, serving)  # the level of the workers that may have it
            group = group.part(_Shortest(serving, level, given).place(group))


def _last_of(group: GroupView, serving: Sequence[WorkerView], given: _Given) -> str:
    """The worker that had the group last, if it has room for it and is not much fuller than the emptiest."""
    if not group.last_worker:
        return ""
    own = next((w for w in serving if w.name == group.last_worker), None)
    if own is None or not len(group.rows) <= given.room[own.name]:
        return ""
    emptiest = min(given.load[w.name] / w.slots for w in serving if w.slots)
    return own.name if given.load[own.name] / own.slots - emptiest <= _FULLER else ""


def _idle_of_the_dedicated(left: list[GroupView], view: AssignView, given: _Given, there: _There) -> _There:
    """Dedicated workers that hold nothing, and for which nothing is kept of another step either."""
    dedicated = there.among(left[0].not_for)
    idle = frozenset(w.name for w in dedicated.able if not given.load[w.name])
    kept = {g.kept_for for g in view.groups if g.step != left[0].step} if idle else set[frozenset[str]]()
    return dedicated.among(idle.difference(*kept))


def _steps(view: AssignView) -> list[int]:
    """Steps in order, those with moved samples first."""
    moved = {g.step for g in view.groups if g.moved}
    return sorted({g.step for g in view.groups}, key=lambda step: (step not in moved, step))


def _soon_ready(view: AssignView, step: int, now: float) -> list[WorkerView]:
    need = step - view.max_staleness
    return [
        w
        for w in view.workers
        if w.policy_version < need <= w.pulling_version and now - w.pulling_since_s < view.pull_patience_s
    ]


def _share(groups: list[GroupView], load: dict[str, int], workers: list[WorkerView]) -> int:
    """The level to which workers are filled: the lowest that holds all the work, like water in a row of vessels."""
    total = sum(len(g.rows) for g in groups) + sum(load[w.name] for w in workers)
    low, high = 1, max(1, *(w.slots for w in workers))
    while low < high:
        level = (low + high) // 2
        if sum(max(load[w.name], min(level, w.slots)) for w in workers) >= total:
            high = level
        else:
            low = level + 1
    return low


class _Shortest:
    """Orders workers with room below a level, the least loaded first. A group costs O(log workers).

    Loads only rise while a decision is made, so an entry that is out of date stands too far in front, and is put back
    where it belongs when it gets to the top.
    """

    def __init__(self, workers: list[WorkerView], share: int, given: _Given) -> None:
        self._share, self._given = share, given
        with_room = [w for w in workers if given.room[w.name] > 0]  # a worker may have no slot at all
        self._queue = [(_length(w, given.load[w.name]), i, w) for i, w in enumerate(with_room)]
        heapq.heapify(self._queue)

    def place(self, group: GroupView) -> np.ndarray:
        """Give the group to one worker, if one has room for it, else to as few as possible; returns the rest."""
        rows = group.rows
        while len(rows) and (found := self._first_for(len(rows))) is not None:
            name, n = found
            self._given.give(name, group.step, rows[:n])
            rows = rows[n:]
        return rows

    def _first_for(self, samples: int) -> tuple[str, int] | None:
        """The first worker with room below its share for all ``samples``, else the roomiest of the first few.

        Returns its name, and how many samples it can have; None: no worker has room.
        """
        passed, best = list[tuple[tuple[int, float], int, WorkerView]](), None
        while (entry := self._top()) is not None:
            name = entry[2].name
            n = min(samples, self._given.room[name], self._share - self._given.load[name])
            if best is None or n > best[1]:
                best = name, n
            if n == samples or len(passed) + 1 == _LOOKS:
                break
            passed.append(heapq.heappop(self._queue))
        for entry in passed:
            heapq.heappush(self._queue, entry)
        return best

    def _top(self) -> tuple[tuple[int, float], int, WorkerView] | None:
        """The shortest queue that has room, left where it is."""
        queue, room, load = self._queue, self._given.room, self._given.load
        while queue:
            length, i, worker = queue[0]
            if min(room[worker.name], self._share - load[worker.name]) <= 0:
                heapq.heappop(queue)
            elif (now := _length(worker, load[worker.name])) > length:
                heapq.heapreplace(queue, (now, i, worker))
            else:
                return queue[0]
        return None


def _length(worker: WorkerView, held: int) -> tuple[int, float]:
    """Length of the worker's queue, with ``held`` samples."""
    return worker.pending(held), held / worker.slots


def _place_alone(group: GroupView, workers: list[WorkerView], given: _Given) -> bool:
    """Give a suspect to the least loaded worker that has none, if there is one; returns whether a worker got it."""
    n, room = len(group.rows), given.room
    able = [w for w in workers if w.name not in given.taken and room[w.name] > 0]
    fitting = [w for w in able if room[w.name] >= n or given.load[w.name] == 0]
    if fitting:
        name = min(fitting, key=lambda w: given.load[w.name] / w.slots).name
        given.give(name, group.step, group.rows[: min(n, room[name])])
        given.taken.add(name)
    return bool(fitting)


def _cut(picks: dict[tuple[str, int], list[np.ndarray]], message_samples: int) -> list[AssignSamples]:
    whole = {key: np.concatenate(parts) for key, parts in picks.items()}
    return [
        AssignSamples(worker, step, rows[start : start + message_samples])
        for (worker, step), rows in whole.items()
        for start in range(0, len(rows), message_samples)
    ]
