"""Who generates what: join the shortest queue, by credit.

Invariants
- A worker never holds more samples than it has slots, nor generates a sample of step s with a version < s - k.
- A sample never goes on with an older version than its tokens are of.
- Moved samples go first, then older steps, then the longest as predicted, then prompts in order: what others wait for
  comes before what can wait.
- A suspect, a prompt that an engine held when it crashed, is given whole to a worker that holds no other suspect: when
  that one crashes too, it is known why.
- Groups that are kept for certain workers (``dispatch_long``) go to those, and to others only when those are gone or
  when the others have nothing else to do.
- Siblings stay together, so that their prompt is prefilled once, unless that would leave another worker short.
- The shortest queue is that with the fewest samples that could not begin, then the one that is least full. How many may
  wait at a worker at all is the view's business: ``slots`` is the cap.

A worker that is loading the version that a step needs gets its share ahead, for ``pull_patience_s``: it holds the work
and begins as soon as it has loaded, without a message back and forth in between. What has moved goes to a worker that
serves already, where there is one.
"""

from __future__ import annotations

import heapq

import numpy as np

from actors.scheduler.decisions import AssignSamples, Decision
from actors.scheduler.policies.longest_first import longest_first
from actors.scheduler.view import AssignView, GroupView, WorkerView


def decide(view: AssignView, now: float) -> list[Decision]:
    """Assign as many queued samples as credit allows."""
    hands = _Hands(view)
    for step in _steps(view):
        groups = [g for g in view.groups if g.step == step]
        ready = [w for w in view.workers if w.policy_version >= step - view.max_staleness]
        able = ready + _soon_ready(view, step, now)
        if able:
            left = [_place_lane(lane, ready, able, hands) for lane in _lanes(groups)]
            _place_left(left, able, hands)
    return _cut(hands.picks, view.message_samples)


class _Hands:
    """What has been given so far."""

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
    """Groups that are kept for certain workers, then the others, each in the order in which they are placed."""
    kept = [g for g in groups if g.kept_for]
    return [_in_order(lane) for lane in (kept, [g for g in groups if not g.kept_for]) if lane]


def _in_order(groups: list[GroupView]) -> list[GroupView]:
    """Moved ones, then the longest; what nobody knows counts as the median. Ties keep the order of prompts."""
    expected = np.array([g.expected_tokens for g in groups])
    known = expected[np.isfinite(expected)]
    filled = np.where(np.isnan(expected), np.median(known) if len(known) else 0.0, expected)
    return sorted((groups[i] for i in longest_first(filled)), key=lambda g: not g.moved)


def _place_lane(
    groups: list[GroupView], ready: list[WorkerView], able: list[WorkerView], hands: _Hands
) -> list[GroupView]:
    """Place what may be placed among the lane's own workers; returns what is left of its groups."""
    own = groups[0].kept_for or frozenset(w.name for w in able) - groups[0].not_for
    if any(w.name in own for w in able):  # else all of them are gone: anybody may
        ready, able = [w for w in ready if w.name in own], [w for w in able if w.name in own]
    share = _share(groups, hands.load, able)
    anybody, at_once = _Shortest(able, share, hands), _Shortest(ready or able, share, hands)
    left: list[GroupView] = []
    for group in groups:
        if group.suspect or group.version >= 0:
            serving = [w for w in ready if w.policy_version >= group.version]
            if group.suspect:
                _place_alone(group, serving, hands)
            elif serving:
                level = _share([group], hands.load, serving)  # among those alone who may have it
                _Shortest(serving, level, hands).place(group)
            continue
        rows = (at_once if group.moved else anybody).place(group)
        if len(rows):
            left.append(group if len(rows) == len(group.rows) else group.part(rows))
    return left


def _place_left(lanes: list[list[GroupView]], able: list[WorkerView], hands: _Hands) -> None:
    """Of two lanes: workers without work of their own lane help out, dedicated ones only when they would idle."""
    if len(lanes) < 2:
        return
    long, others = lanes
    helpers = [w for w in able if hands.load[w.name] == 0] if others else [w for w in able if hands.room[w.name] > 0]
    left = others or long
    if left and helpers:
        shortest = _Shortest(helpers, _share(left, hands.load, helpers), hands)
        for group in left:
            shortest.place(group)


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
    """Workers with room below a level, the least loaded first. Made once for many groups: a group costs O(log workers).

    Loads only rise while a decision is made, so an entry that is out of date stands too far in front, and is put back
    where it belongs when it gets to the top.
    """

    def __init__(self, workers: list[WorkerView], share: int, hands: _Hands) -> None:
        self._share, self._hands = share, hands
        with_room = [w for w in workers if hands.room[w.name] > 0]  # one that rests may have no slot at all
        self._queue = [(_length(w, hands.load[w.name]), i, w) for i, w in enumerate(with_room)]
        heapq.heapify(self._queue)

    def place(self, group: GroupView) -> np.ndarray:
        """Give the group to the first, and what exceeds its share to the next; returns the rest."""
        rows, queue, room, load = group.rows, self._queue, self._hands.room, self._hands.load
        while len(rows) and queue:
            length, i, worker = queue[0]
            n = min(len(rows), room[worker.name], self._share - load[worker.name])
            if n <= 0:
                heapq.heappop(queue)
            elif (now := _length(worker, load[worker.name])) > length:
                heapq.heapreplace(queue, (now, i, worker))
            else:
                self._hands.give(worker.name, group.step, rows[:n])
                rows = rows[n:]
        return rows


def _length(worker: WorkerView, held: int) -> tuple[int, float]:
    """Of its queue, with ``held`` samples."""
    return worker.pending(held), held / worker.slots


def _place_alone(group: GroupView, workers: list[WorkerView], hands: _Hands) -> None:
    """Give a suspect to the least loaded worker that has none, or to nobody yet."""
    n, room = len(group.rows), hands.room
    able = [w for w in workers if w.name not in hands.taken and room[w.name] > 0]
    fitting = [w for w in able if room[w.name] >= n or hands.load[w.name] == 0]
    if fitting:
        name = min(fitting, key=lambda w: hands.load[w.name] / w.slots).name
        hands.give(name, group.step, group.rows[: min(n, room[name])])
        hands.taken.add(name)


def _cut(picks: dict[tuple[str, int], list[np.ndarray]], message_samples: int) -> list[Decision]:
    whole = {key: np.concatenate(parts) for key, parts in picks.items()}
    return [
        AssignSamples(worker, step, rows[start : start + message_samples])
        for (worker, step), rows in whole.items()
        for start in range(0, len(rows), message_samples)
    ]
