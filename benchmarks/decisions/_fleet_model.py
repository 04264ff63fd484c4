"""A fleet under the live scheduler's own rule: policies.assign.decide hands out samples, round by round, by credit.

    Fleet ── each round: AssignView of all workers and queued groups ─▶ assign.decide ─▶ samples to workers
      │ a worker decodes its batch; the next finish is its next event      (as Dispatcher does, without its messages)
      └ finished samples ─▶ trainer ─▶ version + 1 ─▶ transfer_s later every worker serves it

Where ``generation.generate`` replays one batch that was dispatched once, here steps overlap: while the tail of one is
decoded, free places take samples of the next, as far as ``max_staleness`` lets them. An event is a finish, a round, or
an end of training, so a token costs nothing.

Invariants
- A sample of step s is handed only to workers whose version is at least s - max_staleness: the policy sees to it.
- A worker's pace is that of its batch at the mean context until its next finish; it is set anew when the batch changes.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from actors.policies.assigning import assign
from actors.policies.assigning.assign import AssignSamples
from actors.policies.assigning.generation_time import StepTime
from actors.policies.assigning.view import AssignView, GroupView, WorkerView

Decide = Callable[[AssignView, float], list[AssignSamples]]
"""An assignment policy; ``assign.decide`` is the live one."""
_MESSAGE_SAMPLES = 4096


@dataclass(frozen=True, slots=True)
class FleetRules:
    """What a run has besides workers and samples."""

    max_staleness: int
    streaming: bool
    """The trainer takes what has arrived; else it waits for the whole batch."""
    group_size: int
    prompt_tokens: int
    train_sample_s: Callable[[np.ndarray], np.ndarray]
    """Lengths → what each sample takes the trainer."""
    step_s: float
    """Time of the optimizer, with all that workers wait for before weights leave."""
    transfer_s: float
    round_s: float
    """Between two rounds of the scheduler."""


@dataclass(slots=True)
class _Worker:
    name: str
    pace: StepTime
    places: int
    running: list[tuple[float, int, int]] = field(default_factory=list[tuple[float, int, int]])
    """(token count of the worker at which it ends, step, row), a heap."""
    tokens: float = 0.0
    """Decoded by each sequence that has been here all the time."""
    context: float = 0.0
    """Tokens that all running samples together have in the cache."""
    at_s: float = 0.0
    token_s: float = 0.0
    life: int = 0
    """Counts changes of the batch; an event of an older one is void."""


@dataclass(slots=True)
class _Step:
    lengths: np.ndarray
    train_s: np.ndarray
    queued: np.ndarray
    """Rows that nobody has been given, in order."""
    waiting: list[float] = field(default_factory=list[float])
    """Training times of finished samples that the trainer has not taken."""
    finished: int = 0
    trained: int = 0


class Fleet:
    """See the module's docstring. Workers are (pace, places); ``lengths`` gives those of a step's samples."""

    def __init__(
        self,
        workers: list[tuple[StepTime, int]],
        lengths: Callable[[int], np.ndarray],
        rules: FleetRules,
        decide: Decide = assign.decide,
    ) -> None:
        self._workers = [_Worker(f"w{i}", pace, places) for i, (pace, places) in enumerate(workers)]
        self._index = {worker.name: i for i, worker in enumerate(self._workers)}
        self._lengths, self._rules, self._decide = lengths, rules, decide
        self._steps: dict[int, _Step] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._version, self._training, self._busy = 0, 0, False
        self.now_s = 0.0
        self.trained_s: list[float] = []
        """When each step was trained."""
        self.finished = 0
        self.rounds = 0

    def run(self, *, steps: int | None = None, until_s: float = float("inf")) -> None:
        """Until so many steps are trained, or for so long."""
        self._at(0.0, self._round)
        while self._events and self._events[0][0] <= until_s and (steps is None or len(self.trained_s) < steps):
            self.now_s, _, act = heapq.heappop(self._events)
            act()

    def _at(self, when_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), act))

    # ------------------------------------------------------------ rounds

    def _round(self) -> None:
        """What a scheduler does when it hands out: a view, a decision, the samples to the workers."""
        self.rounds += 1
        self._at(self.now_s + self._rules.round_s, self._round)
        groups = [group for step in self._open_steps() for group in self._groups(step)]
        if not groups or not any(len(w.running) < w.places for w in self._workers):
            return
        workers = [WorkerView(w.name, self._version, w.places, len(w.running)) for w in self._workers]
        view = AssignView(workers, groups, self._rules.max_staleness, 0.0, _MESSAGE_SAMPLES)
        given: dict[int, list[np.ndarray]] = {}
        for decision in self._decide(view, self.now_s):
            self._hand(self._workers[self._index[decision.worker]], decision.step, decision.rows)
            given.setdefault(decision.step, []).append(decision.rows)
        for number, rows in given.items():
            step = self._steps[number]
            step.queued = np.setdiff1d(step.queued, np.concatenate(rows), assume_unique=True)

    def _open_steps(self) -> range:
        opened = range(len(self.trained_s), self._version + self._rules.max_staleness + 1)
        for number in opened:
            if number not in self._steps:
                lengths = self._lengths(number)
                rows = np.arange(len(lengths), dtype=np.int32)
                self._steps[number] = _Step(lengths, self._rules.train_sample_s(lengths), rows)
        return opened

    def _groups(self, number: int) -> list[GroupView]:
        rows = self._steps[number].queued
        if not len(rows):
            return []
        prompts = rows // self._rules.group_size
        parts = np.split(rows, np.flatnonzero(np.diff(prompts)) + 1)
        return [GroupView(number, int(part[0]) // self._rules.group_size, part) for part in parts]

    # ------------------------------------------------------------ workers

    def _hand(self, worker: _Worker, number: int, rows: np.ndarray) -> None:
        self._advance(worker)
        for row, length in zip(rows.tolist(), self._steps[number].lengths[rows].tolist(), strict=True):
            heapq.heappush(worker.running, (worker.tokens + length, number, row))
        worker.context += self._rules.prompt_tokens * len(rows)
        self._set_pace(worker)

    def _advance(self, worker: _Worker) -> None:
        """To now."""
        if worker.running:
            done = (self.now_s - worker.at_s) / worker.token_s
            worker.tokens += done
            worker.context += done * len(worker.running)
        worker.at_s = self.now_s

    def _set_pace(self, worker: _Worker) -> None:
        worker.life += 1
        if not worker.running:
            worker.context = 0.0
            return
        batch, left = len(worker.running), max(0.0, worker.running[0][0] - worker.tokens)
        worker.token_s = worker.pace.step_s(batch, worker.context / batch + left / 2)
        life = worker.life
        self._at(self.now_s + left * worker.token_s, lambda: self._finish(worker, life))

    def _finish(self, worker: _Worker, life: int) -> None:
        if life != worker.life:
            return  # its batch has changed since
        self._advance(worker)
        worker.tokens = worker.running[0][0]  # what arithmetic left over
        while worker.running and worker.running[0][0] <= worker.tokens:
            _, number, row = heapq.heappop(worker.running)
            step = self._steps[number]
            worker.context -= self._rules.prompt_tokens + float(step.lengths[row])
            step.waiting.append(float(step.train_s[row]))
            step.finished += 1
            self.finished += 1
        self._set_pace(worker)
        self._train()

    # ------------------------------------------------------------ trainer

    def _train(self) -> None:
        """Take what has arrived of the step that is due."""
        step = self._steps.get(self._training)
        if self._busy or step is None or not step.waiting:
            return
        if not self._rules.streaming and step.finished < len(step.lengths):
            return
        taken, seconds = len(step.waiting), sum(step.waiting)
        step.waiting.clear()
        self._busy = True
        last = step.trained + taken == len(step.lengths)
        self._at(self.now_s + seconds + (self._rules.step_s if last else 0.0), lambda: self._trained(step, taken))

    def _trained(self, step: _Step, taken: int) -> None:
        self._busy = False
        step.trained += taken
        if step.trained == len(step.lengths):
            self.trained_s.append(self.now_s)
            del self._steps[self._training]
            self._training += 1
            self._at(self.now_s + self._rules.transfer_s, self._arrived)
        self._train()

    def _arrived(self) -> None:
        self._version += 1
