"""Scored groups to the trainer, as each becomes complete.

Invariants
- A group is sent once all its siblings are scored or dropped; one with fewer than two scored siblings is dropped,
  since nothing can be learned from it.
- StepLeased follows the last group of the step, once, after all of them.
- A committed step is sent again exactly as it was committed, marked ``replay``.
- What the trainer's queue does not take is not leased; it is tried again at the next tick.

    OpenStep ──▶ open ──▶ pump: complete groups ──LeaseGroup──▶ trainer ──(all sent)── StepLeased ──▶ trainer
"""

from __future__ import annotations

import numpy as np

from actors.scheduler import events as ev
from actors.scheduler.batch import SampleState, StepBatch
from actors.scheduler.books import Books
from actors.scheduler.dispatch import Tell
from actors.scheduler.messages import LeaseGroup, StepLeased
from transport.address import ActorAddress
from transport.transport import SendOutcome

S = SampleState
_MIN_GROUP = 2


class Leases:
    """The one step that the trainer consumes now."""

    def __init__(self, job: str, books: Books, tell: Tell) -> None:
        self._job = job
        self._books = books
        self._tell = tell
        self.trainer: ActorAddress | None = None
        self.step = -1
        self.all_sent = False
        self._sent = np.zeros(0, np.bool_)

    def open(self, step: int, trainer: ActorAddress) -> None:
        """Start over with ``step``: leases of an earlier opening are void.

        Raises:
            IllegalTransition: the step is ahead of the frontier, or its samples have been pruned.
        """
        ledger = self._books.ledger
        batch = ledger.batches.get(step)
        if step != ledger.trainer_step or (batch is not None and bool(np.any(batch.state == S.LEASED))):
            self._books.apply(ev.Rewound(step))
        self.step, self.trainer = step, trainer
        self.all_sent = False
        self._sent = np.zeros(0, np.bool_)

    def close(self) -> None:
        """The step is committed, or the trainer is gone."""
        self.trainer = None
        self.all_sent = False

    def pump(self) -> None:
        """Send what can be sent."""
        batch = self._books.ledger.batches.get(self.step)
        if self.trainer is None or batch is None or self.all_sent:
            return
        if not len(self._sent):
            self._sent = np.zeros(len(batch.prompts), np.bool_)
        ready = np.nonzero(_complete(batch) & ~self._sent)[0]
        if len(ready):
            if not batch.committed:
                ready = self._without_small(batch, ready)
            self._send_groups(batch, ready, self.trainer)
        if self._sent.all():
            self._finish(batch, self.trainer)

    def _without_small(self, batch: StepBatch, ready: np.ndarray) -> np.ndarray:
        """Drop the groups with too few scored siblings, return the others."""
        scored = (batch.state.reshape(-1, batch.group_size)[ready] == S.SCORED).sum(axis=1)
        for index in ready[scored < _MIN_GROUP].tolist():
            rows = batch.group_rows(index)
            rows = rows[batch.state[rows] == S.SCORED]
            if len(rows):
                self._books.apply(ev.Dropped(batch.step, rows, f"fewer than {_MIN_GROUP} siblings have a reward"))
            self._sent[index] = True
        return ready[scored >= _MIN_GROUP]

    def _send_groups(self, batch: StepBatch, ready: np.ndarray, trainer: ActorAddress) -> None:
        wanted = S.COMMITTED if batch.committed else S.SCORED
        leased: list[np.ndarray] = []
        for index in ready.tolist():
            rows = batch.group_rows(index)
            rows = rows[batch.state[rows] == wanted]
            if len(rows):
                if self._tell(trainer, _group(self._job, batch, index, rows)) is not SendOutcome.QUEUED:
                    break
                leased.append(rows)
            self._sent[index] = True
        if leased:
            self._books.apply(ev.Leased(batch.step, np.concatenate(leased), replay=batch.committed))

    def _finish(self, batch: StepBatch, trainer: ActorAddress) -> None:
        wanted = S.COMMITTED if batch.committed else S.LEASED
        there = batch.state.reshape(-1, batch.group_size) == wanted
        message = StepLeased(
            job=self._job,
            step=batch.step,
            groups=int(there.any(axis=1).sum()),
            samples=int(there.sum()),
            dropped=int((batch.state == S.DROPPED).sum()),
        )
        self.all_sent = self._tell(trainer, message) is SendOutcome.QUEUED


def _complete(batch: StepBatch) -> np.ndarray:
    """bool[P]: every sibling is scored or dropped; of a committed batch, every group is."""
    if batch.committed:
        return np.ones(len(batch.prompts), np.bool_)
    state = batch.state.reshape(-1, batch.group_size)
    return ((state == S.SCORED) | (state == S.DROPPED)).all(axis=1)


def _group(job: str, batch: StepBatch, index: int, rows: np.ndarray) -> LeaseGroup:
    ragged = batch.ragged(rows)
    return LeaseGroup(
        job=job,
        step=batch.step,
        prompt=int(batch.prompts[index]),
        replay=batch.committed,
        prompt_ids=batch.prompt_ids[index],
        siblings=rows % batch.group_size,
        lengths=ragged.lengths,
        tokens=ragged.tokens,
        logprobs=ragged.logprobs,
        versions=ragged.versions,
        finished=batch.finish[rows],
        rewards=batch.reward[rows],
    )
