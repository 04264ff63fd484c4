"""The ledger: no token lost, no sample twice.

Invariants
- The ledger is a fold over events: ``apply`` reads no clock, does no I/O, and equal events give equal ledgers.
- ``apply`` refuses an illegal event with IllegalTransition *before* it changes anything.
- A delta's rows enter only if their assignment is live with that worker and they go on exactly where the sample ends;
  every other row is counted (unknown, duplicate, gap) and ignored.
- A step is committed with the samples that it names; a replay must name the same ones.

            BatchIssued        Assigned        TokensAppended      Scored        Leased         Committed
    (none) ────────────▶ queued ──────▶ assigned ───────▶ streaming ─▶ finished ─▶ scored ─▶ leased ─▶ committed
                           ▲                 │  Returned       │                     ▲  Rewound  │
                           └─────────────────┴─────────────────┘                     └───────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from actors.scheduler import events as ev
from actors.scheduler.batch import IN_FLIGHT, SampleState, StepBatch, one_of, ragged_positions
from actors.scheduler.errors import IllegalTransition
from actors.scheduler.messages import FinishReason
from actors.scheduler.slots import Slots

S = SampleState
_UNSETTLED = (S.QUEUED, S.ASSIGNED, S.STREAMING, S.FINISHED, S.SCORED)


@dataclass(slots=True)
class Outcome:
    """What an event did, for the scheduler: nothing here is state."""

    tokens: int = 0
    finished: dict[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])
    """Step → rows that became finished."""
    queued: dict[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])
    """Step → rows that went back to the queue."""
    ended: int = 0
    """Hand-outs that are over, finished ones included."""
    broken: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Assignments that run on the worker though the ledger disagrees (gap, overlap, not live): revoke them."""


@dataclass(slots=True)
class Counters:
    """Grow only. ``prompts_lost`` and ``samples_trained_twice`` are 0 in a right system."""

    tokens: int = 0
    unknown_rows: int = 0
    duplicate_rows: int = 0
    gap_rows: int = 0
    samples_migrated: int = 0
    prompts_lost: int = 0
    samples_trained_twice: int = 0
    dropped: int = 0


class Ledger:
    """``floor``: events of steps below it have been pruned from the journal, and what refers to them is passed over."""

    def __init__(self, floor: int = 0) -> None:
        self.floor = floor
        self._restoring = False
        self.epoch = 0
        self.batches: dict[int, StepBatch] = {}
        self.committed_steps = 0
        """Steps 0..committed_steps-1 are committed."""
        self.trainer_step = 0
        """The step that the trainer commits next; below ``committed_steps`` while it replays."""
        self.checkpoints: list[tuple[int, str]] = []
        self.paused = False
        """Nothing is to be handed out."""
        self.counters = Counters()
        self._slots = Slots()
        self._workers: dict[str, int] = {}
        self._trained_in = np.full(1024, -1, np.int32)  # prompt ordinal → step that trained it
        self._next_prompt = 0
        self._handlers: dict[type, Callable[[Any], Outcome]] = {
            ev.Opened: self._opened,
            ev.BatchIssued: self._issued,
            ev.Assigned: self._assigned,
            ev.TokensAppended: self._appended,
            ev.Returned: self._returned,
            ev.Suspected: self._suspected,
            ev.Scored: self._scored,
            ev.Dropped: self._dropped,
            ev.Leased: self._leased,
            ev.Committed: self._committed,
            ev.Checkpointed: self._checkpointed,
            ev.Paused: self._pause,
            ev.Rewound: self._rewound,
        }

    def apply(self, event: ev.Event) -> Outcome:
        """Fold one event.

        Raises:
            IllegalTransition: the event does not fit; the ledger is unchanged.
        """
        return self._handlers[type(event)](event)

    def restore(self, events: Iterable[ev.Event]) -> None:
        """Fold a journal, of which everything but commits may have been pruned below ``floor``."""
        self._restoring = True
        try:
            for event in events:
                self.apply(event)
        finally:
            self._restoring = False

    # ------------------------------------------------------------ questions

    @property
    def next_assignment(self) -> int:
        return self._slots.next

    @property
    def issued_steps(self) -> int:
        """One past the newest step whose batch has been issued."""
        return max(max(self.batches, default=-1) + 1, self.committed_steps)

    def in_flight(self, worker: str) -> np.ndarray:
        """int64[n] live assignments of ``worker``."""
        return self._slots.of_worker(self._workers.get(worker, -1))

    def in_flight_from(self, worker: str, step: int) -> np.ndarray:
        """int64[n] live assignments of ``worker`` for ``step`` and later ones."""
        numbers = self.in_flight(worker)
        steps, _ = self._slots.find(numbers, self._workers.get(worker, -1))
        return numbers[steps >= step]

    def workers_with_suspects(self) -> set[str]:
        """Workers that hold a sample which may be what kills engines."""
        held: set[int] = set()
        for batch in self.batches.values():
            if batch.crashes.any():
                numbers = batch.assignment[(batch.crashes > 0) & (batch.assignment >= 0)]
                held.update(self._slots.workers_of(numbers).tolist())
        return {name for name, index in self._workers.items() if index in held}

    def live(self, worker: str, assignments: np.ndarray) -> np.ndarray:
        """Those of ``assignments`` that are live with ``worker``."""
        _, rows = self._slots.find(assignments, self._workers.get(worker, -1))
        return assignments[rows >= 0]

    def located(self, worker: str, assignments: np.ndarray) -> dict[int, np.ndarray]:
        """Step → rows of those of ``assignments`` that are live with ``worker``."""
        steps, rows = self._slots.find(assignments, self._workers.get(worker, -1))
        steps, rows = steps[rows >= 0], rows[rows >= 0]
        return {step: rows[steps == step] for step in _distinct(steps)}

    def live_among(self, worker: str, rows: dict[int, np.ndarray]) -> np.ndarray:
        """int64[n] live assignments of ``worker`` that are of ``rows``, by step."""
        numbers = self.in_flight(worker)
        steps, held = self._slots.find(numbers, self._workers.get(worker, -1))
        among = np.zeros(len(numbers), np.bool_)
        for step, wanted in rows.items():
            among |= (steps == step) & np.isin(held, wanted)
        return numbers[among]

    def former_holders(self) -> set[str]:
        """Workers whose samples a former life of the scheduler gave them, and nobody since."""
        held = {int(i) for step, batch in self.batches.items() for i in np.unique(batch.holder[self._former(step)])}
        return {name for name, index in self._workers.items() if index in held}

    def formerly_with(self, workers: set[str], step: int) -> np.ndarray:
        """int32[n] queued rows of ``step`` that a former life of the scheduler gave to one of ``workers``."""
        rows = self._former(step)
        return rows[np.isin(self.batches[step].holder[rows], [self._workers.get(name, -2) for name in workers])]

    def _former(self, step: int) -> np.ndarray:
        batch = self.batches[step]
        return np.nonzero((batch.state == S.QUEUED) & (batch.former >= 0))[0].astype(np.int32)

    def count_states(self) -> dict[str, int]:
        counts = np.zeros(len(SampleState), np.int64)
        for batch in self.batches.values():
            counts += np.bincount(batch.state, minlength=len(SampleState))
        return {state.name.lower(): int(counts[state]) for state in SampleState}

    # ------------------------------------------------------------ events

    def _batch(self, step: int) -> StepBatch:
        batch = self.batches.get(step)
        if batch is None:
            raise IllegalTransition(f"step {step}: no batch has been issued, or it has been pruned")
        return batch

    def _opened(self, event: ev.Opened) -> Outcome:
        if event.epoch <= self.epoch:
            raise IllegalTransition(f"epoch {event.epoch} is not above {self.epoch}")
        outcome = Outcome()
        self.epoch = event.epoch
        for batch in self.batches.values():
            rows = np.nonzero(one_of(*IN_FLIGHT)[batch.state])[0].astype(np.int32)
            batch.former[rows] = batch.assignment[rows]
            batch.holder[rows] = self._slots.workers_of(batch.assignment[rows])
            self._settle_returned(batch, rows, outcome)
            batch.state[batch.state == S.LEASED] = S.SCORED
        self._slots.reset(event.epoch)
        return outcome

    def _issued(self, event: ev.BatchIssued) -> Outcome:
        if event.step in self.batches or (event.step < self.committed_steps and not self._restoring):
            raise IllegalTransition(f"step {event.step}: its batch has been issued already")
        batch = StepBatch(event)
        first = int(batch.prompts[0])
        if first < self._next_prompt:
            raise IllegalTransition(f"step {event.step}: prompt {first} belongs to an earlier step")
        if not (self._restoring and event.step <= self.floor):  # the batch before it may have been pruned
            self.counters.prompts_lost += int(batch.prompts[-1]) + 1 - self._next_prompt - len(batch.prompts)
        self._next_prompt = int(batch.prompts[-1]) + 1
        self.batches[event.step] = batch
        return Outcome()

    def _assigned(self, event: ev.Assigned) -> Outcome:
        if self._pruned(event.step):
            return Outcome()
        batch = self._batch(event.step)
        batch.require(event.rows, (S.QUEUED,), "assign")
        if event.first < self._slots.next:
            raise IllegalTransition(f"assignment {event.first} has been given: the next one is {self._slots.next}")
        self._slots.skip_to(event.first)
        worker = self._workers.setdefault(event.worker, len(self._workers))
        batch.assignment[event.rows] = event.first + np.arange(len(event.rows))
        self._slots.give(event.step, event.rows, worker)
        batch.state[event.rows] = S.ASSIGNED
        batch.former[event.rows] = -1
        if not event.again:
            self.counters.samples_migrated += int(np.count_nonzero(batch.attempts[event.rows]))
            batch.attempts[event.rows] += 1
        return Outcome()

    def _appended(self, event: ev.TokensAppended) -> Outcome:
        n, total = len(event.assignments), len(event.tokens)
        columns = (event.offsets, event.counts, event.finished)
        if any(len(c) != n for c in columns) or np.any(event.counts < 0) or int(event.counts.sum()) != total:
            raise IllegalTransition(f"a delta of {event.worker} has columns that do not fit each other")
        if len(event.logprobs) != total:
            raise IllegalTransition(f"a delta of {event.worker} has {total} tokens and {len(event.logprobs)} logprobs")
        outcome = Outcome()
        for pick in _passes(event.assignments):
            steps, rows = self._slots.find(event.assignments, self._workers.get(event.worker, -1))
            known = pick & (rows >= 0)
            unknown = pick & (rows < 0)
            if unknown.any():
                self.counters.unknown_rows += int(np.count_nonzero(unknown))
                still_runs = unknown & (event.finished == FinishReason.RUNNING)
                outcome.broken = np.concatenate([outcome.broken, event.assignments[still_runs]])
            for step in _distinct(steps[known]):
                self._append_step(event, step, rows, known & (steps == step), outcome)
        return outcome

    def _append_step(
        self, event: ev.TokensAppended, step: int, all_rows: np.ndarray, pick: np.ndarray, outcome: Outcome
    ) -> None:
        """Enter the rows of a delta that belong to one step."""
        batch = self._batch(step)
        length = batch.length[np.where(pick, all_rows, 0)]
        duplicate = pick & (event.offsets < length)
        fits = event.offsets + event.counts <= batch.sampling.max_tokens
        gap = pick & ~duplicate & ((event.offsets > length) | ~fits | (event.finished > FinishReason.ABORTED))
        good = pick & ~duplicate & ~gap
        self.counters.duplicate_rows += int(np.count_nonzero(duplicate))
        self.counters.gap_rows += int(np.count_nonzero(gap))
        overlap = duplicate & (event.offsets + event.counts > length)
        if gap.any() or overlap.any():
            outcome.broken = np.concatenate([outcome.broken, event.assignments[gap | overlap]])
        if good.all():
            rows, counts, offsets, flat = all_rows, event.counts, event.offsets, slice(None)
        else:
            rows, counts, offsets = all_rows[good], event.counts[good], event.offsets[good]
            flat = np.repeat(good, event.counts)
        if (counts == 1).all():
            at_rows, positions = rows, offsets
        else:
            at_rows, positions = np.repeat(rows, counts), ragged_positions(counts) + np.repeat(offsets, counts)
        batch.put(at_rows, positions, event.tokens[flat], event.logprobs[flat], event.policy_version)
        batch.length[rows] += counts
        batch.state[rows[counts > 0]] = S.STREAMING
        outcome.tokens += len(positions)
        self.counters.tokens += len(positions)
        finished = event.finished[good]
        if finished.any():
            self._end_rows(batch, rows, finished, event.assignments[good], outcome)

    def _end_rows(
        self, batch: StepBatch, rows: np.ndarray, finished: np.ndarray, assignments: np.ndarray, outcome: Outcome
    ) -> None:
        self._slots.end(assignments[finished != FinishReason.RUNNING])
        done = (finished == FinishReason.STOP) | (finished == FinishReason.LENGTH)
        self._settle_finished(batch, rows[done], finished[done], outcome)
        self._settle_returned(batch, rows[finished == FinishReason.ABORTED], outcome)
        outcome.ended += int(np.count_nonzero(finished))

    def _settle_finished(self, batch: StepBatch, rows: np.ndarray, finish: np.ndarray | int, outcome: Outcome) -> None:
        if len(rows):
            batch.state[rows] = S.FINISHED
            batch.finish[rows] = finish
            batch.assignment[rows] = -1
            _join(outcome.finished, batch.step, rows)

    def _settle_returned(self, batch: StepBatch, rows: np.ndarray, outcome: Outcome) -> None:
        """Back to the queue, unless the tokens already end the sample."""
        if not len(rows):
            return
        stopped, spent = batch.ended(rows)
        self._settle_finished(batch, rows[stopped], FinishReason.STOP, outcome)
        self._settle_finished(batch, rows[spent], FinishReason.LENGTH, outcome)
        rows = rows[~stopped & ~spent]
        batch.state[rows] = S.QUEUED
        batch.assignment[rows] = -1
        if len(rows):
            _join(outcome.queued, batch.step, rows)

    def _returned(self, event: ev.Returned) -> Outcome:
        outcome = Outcome()
        located = self.located(event.worker, event.assignments)
        live = self.live(event.worker, event.assignments)
        self._slots.end(live)
        outcome.ended = len(live)
        for step, rows in located.items():
            batch = self._batch(step)
            batch.failures[rows] += event.blame
        if event.crashed:
            self._suspect(located)
        for step, rows in located.items():
            self._settle_returned(self._batch(step), rows, outcome)
        return outcome

    def _suspected(self, event: ev.Suspected) -> Outcome:
        if len(event.steps) != len(event.rows):
            raise IllegalTransition(f"{len(event.rows)} suspects have {len(event.steps)} steps")
        located = {step: event.rows[event.steps == step] for step in _distinct(event.steps)}
        located = {step: rows for step, rows in located.items() if not self._pruned(step)}
        for step, rows in located.items():
            self._batch(step).require(rows, tuple(SampleState), "suspect")
        self._suspect(located)
        return Outcome()

    def _suspect(self, located: dict[int, np.ndarray]) -> None:
        """Blame the prompt that was suspected before and sat among innocent ones; else suspect all that was held."""
        known = {step: rows[self._batch(step).crashes[rows] > 0] for step, rows in located.items()}
        blamed = known if any(len(rows) for rows in known.values()) else located
        for step, rows in blamed.items():
            self._batch(step).crashes[rows] += 1

    def _scored(self, event: ev.Scored) -> Outcome:
        if self._pruned(event.step):
            return Outcome()
        batch = self._batch(event.step)
        batch.require(event.rows, (S.FINISHED,), "score")
        if len(event.rewards) != len(event.rows) or not np.isfinite(event.rewards).all():
            raise IllegalTransition(f"step {event.step}: a reward must be a finite number for each sample")
        batch.reward[event.rows] = event.rewards
        batch.state[event.rows] = S.SCORED
        return Outcome()

    def _dropped(self, event: ev.Dropped) -> Outcome:
        if self._pruned(event.step):
            return Outcome()
        batch = self._batch(event.step)
        batch.require(event.rows, _UNSETTLED, "drop")
        running = batch.assignment[event.rows]
        self._slots.end(running[running >= 0])
        batch.assignment[event.rows] = -1
        batch.state[event.rows] = S.DROPPED
        for row in event.rows.tolist():
            batch.drop_reasons[row] = event.reason
        self.counters.dropped += len(event.rows)
        return Outcome(ended=int(np.count_nonzero(running >= 0)))

    def _leased(self, event: ev.Leased) -> Outcome:
        if self._pruned(event.step):
            return Outcome()
        batch = self._batch(event.step)
        if event.step != self.trainer_step:
            raise IllegalTransition(f"step {event.step}: cannot lease, the trainer is at step {self.trainer_step}")
        if event.replay != batch.committed:
            raise IllegalTransition(f"step {event.step}: a lease is a replay if and only if the step is committed")
        batch.require(event.rows, (S.COMMITTED,) if event.replay else (S.SCORED,), "lease")
        if not event.replay:
            batch.state[event.rows] = S.LEASED
        return Outcome()

    def _committed(self, event: ev.Committed) -> Outcome:
        if self._pruned(event.step):
            self._mark_trained(event.prompts, event.step)
            self.trainer_step = event.step + 1
            self.committed_steps = max(self.committed_steps, self.trainer_step)
            return Outcome()
        batch = self._batch(event.step)
        rows = batch.rows_of(event.prompts, event.siblings)
        if event.step != self.trainer_step:
            raise IllegalTransition(f"step {event.step}: cannot commit, the trainer is at step {self.trainer_step}")
        if batch.committed:
            self._check_replay(batch, rows)
        else:
            self._commit_first(batch, rows)
        self.trainer_step += 1
        self.committed_steps = max(self.committed_steps, self.trainer_step)
        self._slots.compact()
        return Outcome()

    def _check_replay(self, batch: StepBatch, rows: np.ndarray) -> None:
        before = np.nonzero(batch.state == S.COMMITTED)[0]
        if not np.array_equal(np.sort(rows), before):
            raise IllegalTransition(
                f"step {batch.step}: a replay must train on the {len(before)} samples that the step was committed"
                f" with; this one names {len(rows)}, of which {len(np.intersect1d(rows, before))} are the same"
            )

    def _commit_first(self, batch: StepBatch, rows: np.ndarray) -> None:
        batch.require(rows, (S.LEASED,), "commit")
        open_rows = np.nonzero(one_of(*_UNSETTLED)[batch.state])[0].astype(np.int32)
        if len(open_rows):
            batch.require(open_rows, (S.LEASED, S.DROPPED), "commit the step before it is settled:")
        batch.state[rows] = S.COMMITTED
        forgotten = np.nonzero(batch.state == S.LEASED)[0].astype(np.int32)
        if len(forgotten):
            batch.state[forgotten] = S.DROPPED
            batch.drop_reasons.update(dict.fromkeys(forgotten.tolist(), "not named by the trainer's commit"))
            named = np.unique(rows // batch.group_size)
            self.counters.prompts_lost += len(np.setdiff1d(forgotten // batch.group_size, named))
        self.counters.samples_trained_twice += self._mark_trained(batch.prompts_of(rows), batch.step)
        batch.archive()

    def _mark_trained(self, prompts: np.ndarray, step: int) -> int:
        """Note which step trained each prompt; returns how many samples another step had trained before."""
        if not len(prompts):
            return 0
        top = int(prompts.max()) + 1
        if top > len(self._trained_in):
            grown = np.full(max(top, 2 * len(self._trained_in)), -1, np.int32)
            grown[: len(self._trained_in)] = self._trained_in
            self._trained_in = grown
        before = self._trained_in[prompts]
        self._trained_in[prompts] = step
        self._next_prompt = max(self._next_prompt, top)
        return int(np.count_nonzero((before >= 0) & (before != step)))

    def _checkpointed(self, event: ev.Checkpointed) -> Outcome:
        if event.step > self.committed_steps:
            raise IllegalTransition(
                f"a checkpoint at step {event.step} is ahead of the {self.committed_steps} committed"
            )
        for name, value in event.counters.items():  # what was counted before is not recounted from a pruned journal
            setattr(self.counters, name, max(value, getattr(self.counters, name)))
        self.checkpoints = [c for c in self.checkpoints if c[0] < event.step] + [(event.step, event.path)]
        return Outcome()

    def _pause(self, event: ev.Paused) -> Outcome:
        self.paused = event.paused
        return Outcome()

    def _rewound(self, event: ev.Rewound) -> Outcome:
        if not 0 <= event.step <= self.committed_steps:
            raise IllegalTransition(f"cannot go on at step {event.step}: {self.committed_steps} steps are committed")
        missing = [s for s in range(max(event.step, self.floor), self.committed_steps) if s not in self.batches]
        if not self._restoring and (event.step < self.floor or missing):
            raise IllegalTransition(
                f"cannot replay from step {event.step}: steps below {self.floor or missing[0]} have been pruned"
            )
        self.trainer_step = event.step
        for batch in self.batches.values():
            batch.state[batch.state == S.LEASED] = S.SCORED
        return Outcome()

    def _pruned(self, step: int) -> bool:
        return step < self.floor and step not in self.batches

    def forget(self, below: int) -> None:
        """Give back the memory of committed steps before ``below``, which will not be replayed."""
        below = min(below, self.committed_steps)
        self.floor = max(self.floor, below)
        for step in [s for s in self.batches if s < below]:
            del self.batches[step]


def _join(rows_by_step: dict[int, np.ndarray], step: int, rows: np.ndarray) -> None:
    before = rows_by_step.get(step)
    rows_by_step[step] = rows if before is None else np.concatenate([before, rows])


def _distinct(steps: np.ndarray) -> list[int]:
    """Ascending. Nearly always there is one, so that case is quick."""
    if not len(steps):
        return []
    if (steps == steps[0]).all():
        return [int(steps[0])]
    return np.unique(steps).tolist()


def _passes(assignments: np.ndarray) -> Iterator[np.ndarray]:
    """Masks of the rows to judge together: all, or one by one if an assignment comes twice in a delta."""
    n = len(assignments)
    ordered = np.sort(assignments)
    if (ordered[1:] == ordered[:-1]).any():
        yield from np.eye(n, dtype=np.bool_)
    else:
        yield np.ones(n, np.bool_)
