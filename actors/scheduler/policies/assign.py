"""Who generates what: join the shortest queue, by credit.

Invariants
- A worker never holds more samples than it has slots, nor generates a sample of step s with a version < s - k.
- A sample never goes on with an older version than its tokens are of.
- Moved samples go first, then older steps, then prompts in order: what others wait for comes before what can wait.
- A suspect, a prompt that an engine held when it crashed, is given whole to a worker that holds no other suspect: when
  that one crashes too, it is known why.
- Siblings stay together, so that their prompt is prefilled once, unless that would leave another worker short.

A worker that is loading the version that a step needs gets its share ahead, for ``pull_patience_s``: it holds the work
and begins as soon as it has loaded, without a message back and forth in between. What has moved goes to a worker that
serves already, where there is one.
"""

from __future__ import annotations

import heapq

import numpy as np

from actors.scheduler.decisions import AssignSamples, Decision
from actors.scheduler.view import AssignView, GroupView, WorkerView


def decide(view: AssignView, now: float) -> list[Decision]:
    """Assign as many queued samples as credit allows."""
    room = {w.name: w.slots - w.in_flight for w in view.workers}
    load = {w.name: w.in_flight for w in view.workers}
    picks: dict[tuple[str, int], list[np.ndarray]] = {}
    taken = {w.name for w in view.workers if w.has_suspect}
    for step in _steps(view):
        groups = [g for g in view.groups if g.step == step]
        ready = [w for w in view.workers if w.policy_version >= step - view.max_staleness]
        able = ready + _soon_ready(view, step, now)
        if not able:
            continue
        share = _share(groups, load, able)
        for group in sorted(groups, key=lambda g: not g.moved):
            serving = [w for w in ready if w.policy_version >= group.version]
            if group.suspect:
                _place_alone(group, serving, room, load, picks, taken)
            elif group.version >= 0:
                level = _share([group], load, serving) if serving else 0  # among those alone who may have it
                _place(group, serving, room, load, level, picks)
            else:
                _place(group, ready if group.moved and ready else able, room, load, share, picks)
    return _cut(picks, view.message_samples)


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


def _place(
    group: GroupView,
    workers: list[WorkerView],
    room: dict[str, int],
    load: dict[str, int],
    share: int,
    picks: dict[tuple[str, int], list[np.ndarray]],
) -> None:
    """Give the group to the least loaded worker with room, and what exceeds its share to the next."""
    rows = group.rows
    queue = [
        (load[w.name] / w.slots, i, w.name) for i, w in enumerate(workers) if room[w.name] > 0 and load[w.name] < share
    ]
    heapq.heapify(queue)
    while len(rows) and queue:
        _, _, name = heapq.heappop(queue)
        n = min(len(rows), room[name], share - load[name])
        picks.setdefault((name, group.step), []).append(rows[:n])
        rows = rows[n:]
        room[name] -= n
        load[name] += n


def _place_alone(
    group: GroupView,
    workers: list[WorkerView],
    room: dict[str, int],
    load: dict[str, int],
    picks: dict[tuple[str, int], list[np.ndarray]],
    taken: set[str],
) -> None:
    """Give a suspect to the least loaded worker that has none, or to nobody yet."""
    n = len(group.rows)
    fitting = [w for w in workers if w.name not in taken and (room[w.name] >= n or room[w.name] == w.slots)]
    if not fitting:
        return
    name = min(fitting, key=lambda w: load[w.name] / w.slots).name
    n = min(n, room[name])
    picks.setdefault((name, group.step), []).append(group.rows[:n])
    room[name] -= n
    load[name] += n
    taken.add(name)


def _cut(picks: dict[tuple[str, int], list[np.ndarray]], message_samples: int) -> list[Decision]:
    whole = {key: np.concatenate(parts) for key, parts in picks.items()}
    return [
        AssignSamples(worker, step, rows[start : start + message_samples])
        for (worker, step), rows in whole.items()
        for start in range(0, len(rows), message_samples)
    ]
