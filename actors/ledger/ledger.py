"""The ledger: no token lost, no sample twice.

Invariants
- The ledger is a fold over events: ``apply`` reads no clock, does no I/O, and equal events give equal ledgers.
- ``apply`` refuses an illegal event with IllegalTransition *before* it changes anything.
- A report's rows enter only if their assignment is live with that worker and they go on exactly where the sample ends;
  every other row is counted (unknown, duplicate, gap) and ignored.
- A commit names the samples that the step trained on; a replay must name the same ones.

            BatchIssued        Assigned        TokensAppended      Scored        Granted         Committed
    (none) ────────────▶ queued ──────▶ assigned ───────▶ streaming ─▶ finished ─▶ scored ─▶ granted ─▶ committed
                           ▲                 │  Returned       │                     ▲  Rewound  │
                           └─────────────────┴─────────────────┘                     └───────────┘
    of an episode:
            BatchIssued         Turned                      a turn is over         EpisodesEnded
    (none) ────────────▶ waiting ──────▶ queued … streaming ───────────────▶ waiting ──────▶ scored ─▶ …
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from actors.ledger import events as ev
from actors.ledger.batch import IN_FLIGHT, SampleState, StepBatch, one_of
from actors.ledger.episode_entry import EpisodeEntry
from actors.ledger.errors import IllegalTransition
from actors.ledger.ledger_state import LedgerState, distinct
from actors.ledger.outcome import Counters, Outcome, give_back
from actors.ledger.token_entry import TokenEntry
from actors.protocol.evaluations import is_evaluation, name_of_batch, version_of

__all__ = ["Counters", "Ledger", "Outcome"]

S = SampleState
_UNSETTLED = (S.QUEUED, S.ASSIGNED, S.STREAMING, S.WAITING, S.FINISHED, S.SCORED)


class Ledger(LedgerState):
    """Holds the state of all samples; ``apply`` is the one way to change it.

    ledger = Ledger()
    ledger.apply(Opened(term=1))
    ledger.apply(BatchIssued(step=0, ...))                   # its samples are queued
    ledger.apply(Assigned.to_one("rollout-0", 0, first=ledger.next_assignment, rows=rows))
    ledger.apply(TokensAppended.one(...))                    # Outcome(tokens=…, finished={0: rows}): go on from there
    ledger.apply(Committed(step=0, ...))                     # IllegalTransition: it is not granted; nothing has changed

    later = Ledger(floor)
    later.restore(events)                                    # the same events, the same state
    """

    def __init__(self, floor: int = 0) -> None:
        super().__init__(floor)
        self._restoring = False
        self._trained = _TrainedPrompts()
        self._next_prompt = 0
        tokens = TokenEntry(self.batches, self._slots, self._workers, self.counters)
        episodes = EpisodeEntry(self)
        self._handlers: dict[type, Callable[[Any], Outcome]] = {
            ev.Opened: self._opened,
            ev.BatchIssued: self._issued,
            ev.BatchExtended: self._extended,
            ev.Assigned: self._assigned,
            ev.TokensAppended: tokens.enter,
            ev.Returned: self._returned,
            ev.Suspected: self._suspected,
            ev.Scored: self._scored,
            ev.EpisodesBegun: episodes.begin,
            ev.Turned: episodes.turn,
            ev.EpisodeCut: episodes.cut,
            ev.EpisodesEnded: episodes.end,
            ev.Dropped: self._dropped,
            ev.Granted: self._granted,
            ev.Committed: self._committed,
            ev.Checkpointed: self._checkpointed,
            ev.Paused: self._pause,
            ev.Stopping: self._stop,
            ev.WindowLearned: self._learned,
            ev.Evaluated: self._evaluated,
            ev.Rewound: self._rewound,
        }

    def apply(self, event: ev.Event) -> Outcome:
        """Fold one event.

        Raises:
            IllegalTransition: the event does not fit; the ledger is unchanged.
        """
        return self._handlers[type(event)](event)

    def restore(self, events: Iterable[ev.Event]) -> None:
        """Fold a journal, of which all but ``journal.KEPT_KINDS`` may have been pruned below ``floor``."""
        self._restoring = True
        try:
            for event in events:
                self.apply(event)
        finally:
            self._restoring = False

    def _opened(self, event: ev.Opened) -> Outcome:
        if event.term <= self.term:
            raise IllegalTransition(f"term {event.term} is not above {self.term}")
        outcome = Outcome()
        self.term = event.term
        for batch in self.batches.values():
            rows = np.nonzero(one_of(*IN_FLIGHT)[batch.state])[0].astype(np.int32)
            batch.former[rows] = batch.assignment[rows]
            batch.holder[rows] = self._slots.workers_of(batch.assignment[rows])
            give_back(batch, rows, outcome)
            batch.state[batch.state == S.GRANTED] = S.SCORED
        self._slots.reset(event.term)
        return outcome

    def _issued(self, event: ev.BatchIssued) -> Outcome:
        is_old = 0 <= event.step < self.committed_steps
        if event.step in self.batches or (is_old and not self._restoring):
            raise IllegalTransition(f"step {event.step}: its batch has been issued already")
        batch = StepBatch(event)
        if is_evaluation(event.step):  # its prompts are no part of the stream that is trained on
            if version_of(event.step) in self.evaluated:
                raise IllegalTransition(f"{name_of_batch(event.step)} is over")
            batch.beside_step = self.issued_steps - 1
            self.batches[event.step] = batch
            return Outcome()
        first = int(batch.prompts[0])
        if first < self._next_prompt:
            raise IllegalTransition(f"step {event.step}: prompt {first} belongs to an earlier step")
        if not (self._restoring and event.step <= self.floor):  # the batch before it may have been pruned
            self.counters.prompts_lost += int(batch.prompts[-1]) + 1 - self._next_prompt - len(batch.prompts)
        self._use_prompts(batch.prompts)
        self.batches[event.step] = batch
        return Outcome()

    def _extended(self, event: ev.BatchExtended) -> Outcome:
        if self._pruned(event.step):
            self._use_prompts(event.prompts)
            return Outcome()
        batch = self._batch(event.step)
        if event.step != max(self.batches) or int(event.prompts[0]) != self.next_prompt:
            raise IllegalTransition(f"step {event.step}: prompt {int(event.prompts[0])} does not follow on it")
        batch.extend(event)
        self._use_prompts(event.prompts)
        return Outcome()

    @property
    def next_prompt(self) -> int:
        """The first ordinal that no batch has used."""
        return self._next_prompt

    def _use_prompts(self, prompts: np.ndarray) -> None:
        self._next_prompt = self.counters.prompts_used = max(self._next_prompt, int(prompts.max(initial=-1)) + 1)

    def _assigned(self, event: ev.Assigned) -> Outcome:
        if self._pruned(event.step):
            return Outcome()
        batch = self._batch(event.step)
        batch.require(event.rows, (S.QUEUED,), "assign")
        if len(event.workers) != len(event.counts) or (event.counts < 0).any() or event.counts.sum() != len(event.rows):
            told = f"{len(event.workers)} workers with the counts {event.counts.tolist()}"
            raise IllegalTransition(f"{len(event.rows)} rows are handed to {told}")
        if event.first < self._slots.next:
            raise IllegalTransition(f"assignment {event.first} has been given: the next one is {self._slots.next}")
        self._slots.skip_to(event.first)
        workers = [self._workers.setdefault(name, len(self._workers)) for name in event.workers]
        batch.assignment[event.rows] = event.first + np.arange(len(event.rows))
        batch.last_worker[event.rows] = holders = np.repeat(np.array(workers, np.int32), event.counts)
        self._slots.give(event.step, event.rows, holders)
        batch.state[event.rows] = S.ASSIGNED
        batch.former[event.rows] = -1
        if not event.again:
            moved = 0 if is_evaluation(event.step) else np.count_nonzero(batch.attempts[event.rows])
            self.counters.samples_migrated += int(moved)
            batch.attempts[event.rows] += 1
        return Outcome()

    def _returned(self, event: ev.Returned) -> Outcome:
        outcome = Outcome()
        located = self.located(event.worker, event.assignments)
        live = self.live(event.worker, event.assignments)
        self._slots.end(live)
        outcome.count_ended(event.worker, len(live))
        for step, rows in located.items():
            batch = self._batch(step)
            batch.failures[rows] += event.blame
        if event.crashed:
            self._suspect(located)
        for step, rows in located.items():
            give_back(self._batch(step), rows, outcome)
        return outcome

    def _suspected(self, event: ev.Suspected) -> Outcome:
        if len(event.steps) != len(event.rows):
            raise IllegalTransition(f"{len(event.rows)} suspects have {len(event.steps)} steps")
        located = {step: event.rows[event.steps == step] for step in distinct(event.steps)}
        located = {step: rows for step, rows in located.items() if not self._pruned(step)}
        for step, rows in located.items():
            self._batch(step).require(rows, tuple(SampleState), "suspect")
        self._suspect(located)
        return Outcome()

    def _suspect(self, located: dict[int, np.ndarray]) -> None:
        """Suspect once more those of the samples that were suspects before; if none was, suspect all of them."""
        suspects = {step: rows[self._batch(step).crashes[rows] > 0] for step, rows in located.items()}
        blamed = suspects if any(len(rows) for rows in suspects.values()) else located
        for step, rows in blamed.items():
            self._batch(step).crashes[rows] += 1

    def _scored(self, event: ev.Scored) -> Outcome:
        if self._pruned(event.step):
            return Outcome()
        batch = self._batch(event.step)
        batch.require(event.rows, (S.FINISHED,), "score")
        batch.enter_rewards(event.rows, event.rewards, event.parts)
        return Outcome()

    def _dropped(self, event: ev.Dropped) -> Outcome:
        if self._pruned(event.step):
            return Outcome()
        batch = self._batch(event.step)
        batch.require(event.rows, _UNSETTLED, "drop")
        outcome = Outcome()
        self.end_hand_outs(batch, event.rows, outcome)
        batch.state[event.rows] = S.DROPPED
        for row in event.rows.tolist():
            batch.drop_reasons[row] = event.reason
        self.counters.dropped += 0 if is_evaluation(event.step) else len(event.rows)
        return outcome

    def end_hand_outs(self, batch: StepBatch, rows: np.ndarray, outcome: Outcome) -> None:
        """End the running hand-outs of ``rows``, and note them as broken, so that their workers stop them."""
        running = batch.assignment[rows]
        running = running[running >= 0]
        if not len(running):
            return
        holders = self._slots.workers_of(running)
        for index, name in enumerate(self._workers):
            if len(numbers := running[holders == index]):
                outcome.count_ended(name, len(numbers))
                outcome.note_broken(name, numbers)
        self._slots.end(running)
        batch.assignment[rows] = -1

    def _granted(self, event: ev.Granted) -> Outcome:
        if self._pruned(event.step):
            return Outcome()
        batch = self._batch(event.step)
        if event.step != self.trainer_step:
            raise IllegalTransition(f"step {event.step}: cannot grant, the trainer is at step {self.trainer_step}")
        if event.replay != batch.committed:
            raise IllegalTransition(f"step {event.step}: a grant is a replay if and only if the step is committed")
        batch.require(event.rows, (S.COMMITTED,) if event.replay else (S.SCORED,), "grant")
        if not event.replay:
            batch.state[event.rows] = S.GRANTED
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
        batch.require(rows, (S.GRANTED,), "commit")
        open_rows = np.nonzero(one_of(*_UNSETTLED)[batch.state])[0].astype(np.int32)
        if len(open_rows):
            batch.require(open_rows, (S.GRANTED, S.DROPPED), "commit the step before it is settled:")
        batch.state[rows] = S.COMMITTED
        forgotten = np.nonzero(batch.state == S.GRANTED)[0].astype(np.int32)
        if len(forgotten):
            batch.state[forgotten] = S.DROPPED
            batch.drop_reasons.update(dict.fromkeys(forgotten.tolist(), "not named by the trainer's commit"))
            named = np.unique(rows // batch.group_size)
            self.counters.prompts_lost += len(np.setdiff1d(forgotten // batch.group_size, named))
        self.counters.samples_trained_twice += self._mark_trained(batch.prompts_of(rows), batch.step)
        batch.archive()

    def _mark_trained(self, prompts: np.ndarray, step: int) -> int:
        """Note that ``step`` trained these prompts; returns how many of the samples another step had trained before."""
        self._use_prompts(prompts)
        return self._trained.mark(prompts, step)

    def _checkpointed(self, event: ev.Checkpointed) -> Outcome:
        if event.step > self.committed_steps:
            raise IllegalTransition(
                f"a checkpoint at step {event.step} is ahead of the {self.committed_steps} committed"
            )
        # The counters as they were then. A recount from a pruned journal would lack what was pruned, and would count
        # rows as unknown whose hand-out was pruned while their tokens stayed.
        for name, value in event.counters.items():
            setattr(self.counters, name, value)
        self._next_prompt = self.counters.prompts_used = max(self._next_prompt, self.counters.prompts_used)
        self.checkpoints = [c for c in self.checkpoints if c[0] < event.step] + [(event.step, event.path)]
        self.ended = event.final
        return Outcome()

    def _learned(self, event: ev.WindowLearned) -> Outcome:
        self.window = event
        return Outcome()

    def _evaluated(self, event: ev.Evaluated) -> Outcome:
        batch = self.batches.get(event.step)
        if not is_evaluation(event.step) or (event.figures and batch is None and not self._restoring):
            raise IllegalTransition(f"{name_of_batch(event.step)} has no samples that could be evaluated")
        if batch is not None:
            open_rows = np.nonzero(one_of(*_UNSETTLED)[batch.state])[0].astype(np.int32)
            batch.require(open_rows, (S.SCORED,), "evaluate before all is settled:")
        self.batches.pop(event.step, None)
        self.evaluated[version_of(event.step)] = event.figures
        return Outcome()

    def _pause(self, event: ev.Paused) -> Outcome:
        self.paused = event.paused
        return Outcome()

    def _stop(self, event: ev.Stopping) -> Outcome:
        self.stopping = event.stopping
        self.ended = self.ended and event.stopping
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
            batch.state[batch.state == S.GRANTED] = S.SCORED
        return Outcome()

    def forget(self, below: int) -> None:
        """Give back the memory of committed steps before ``below``, which will not be replayed."""
        below = min(below, self.committed_steps)
        self.floor = max(self.floor, below)
        for step in [s for s in self.batches if 0 <= s < below]:
            del self.batches[step]


class _TrainedPrompts:
    """Maps a prompt's ordinal to the step that trained it last, in a column that grows."""

    def __init__(self) -> None:
        self._step = np.full(1024, -1, np.int32)

    def mark(self, prompts: np.ndarray, step: int) -> int:
        """Note that ``step`` trained these, one entry a sample; returns how many another step had trained before."""
        if not len(prompts):
            return 0
        top = int(prompts.max()) + 1
        if top > len(self._step):
            grown = np.full(max(top, 2 * len(self._step)), -1, np.int32)
            grown[: len(self._step)] = self._step
            self._step = grown
        before = self._step[prompts]
        self._step[prompts] = step
        return int(np.count_nonzero((before >= 0) & (before != step)))
