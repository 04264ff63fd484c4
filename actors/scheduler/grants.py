"""Sends scored groups to the trainer, as each becomes complete.

Invariants
- A group is sent once all its siblings are scored or dropped. One with too few scored siblings (fewer than two where
  siblings are compared) is dropped, since nothing can be learned from it.
- StepGranted follows the last group of the step, once; for a step that never comes it is sent alone.
- A committed step is sent again exactly as it was committed, marked ``replay``.
- A group that the trainer's queue does not take is not granted; it is sent again at the next tick.
- With ``scores_early``, scored samples of incomplete groups are sent too, once for each opening. That is advice: it
  changes nothing in the ledger, and a trainer that does not get it misses nothing.

    OpenStep ──▶ open ──▶ pump: complete groups ──GrantGroups──▶ trainer ──(all sent)── StepGranted ──▶ trainer
                       └── the scored samples of others ──EarlySamples──▶ trainer
"""

from __future__ import annotations

import numpy as np

from actors.fleet.fleet import Fleet
from actors.fleet.scope import JobScope
from actors.ledger import events as ev
from actors.ledger.batch import SampleState, StepBatch
from actors.ledger.whole_steps import complete_groups
from actors.protocol.groups import EarlySamples, GrantGroups
from actors.protocol.steps import StepGranted
from actors.protocol.tokens import TOKEN
from actors.scheduler.filtering import SpreadFilter
from transport.address import ActorAddress
from transport.transport import SendOutcome

S = SampleState
MESSAGE_TOKENS = 1 << 18
"""Tokens in a message, about 3 MiB: few messages, and none so large that it holds up the next ones."""


class Grants:
    """Sends the trainer the groups of the step that it has open."""

    def __init__(self, scope: JobScope, fleet: Fleet, spread: SpreadFilter | None = None) -> None:
        self._scope = scope
        self._filter = spread
        self._ledger_writer = scope.ledger_writer
        self._fleet = fleet
        self.trainer: ActorAddress | None = None
        self.step = -1
        self.all_sent = False
        self._sent = np.zeros(0, np.bool_)
        self._told_early = np.zeros(0, np.bool_)

    def open(self, step: int, trainer: ActorAddress) -> None:
        """Begin with ``step``; grants of an earlier opening are void.

        Raises:
            IllegalTransition: the step is ahead of the frontier, or its samples have been pruned.
        """
        ledger = self._ledger_writer.ledger
        batch = ledger.batches.get(step)
        if step != ledger.trainer_step or (batch is not None and bool(np.any(batch.state == S.GRANTED))):
            self._ledger_writer.apply(ev.Rewound(step))
        self.step, self.trainer = step, trainer
        self.all_sent = False
        self._sent = np.zeros(0, np.bool_)
        self._fleet.mode.trainer_opened(step)

    def close(self) -> None:
        """Forget the trainer: the step is committed, or the trainer is gone."""
        self.trainer = None
        self.all_sent = False
        self._fleet.mode.trainer_opened(-1)

    def end(self) -> None:
        """Tell the trainer that there is no such step. If the message is lost, it opens the step again."""
        if self.trainer is not None:
            self._scope.tell(
                self.trainer, StepGranted(self._scope.name, self.step, groups=0, samples=0, dropped=0, never=True)
            )

    def pump(self) -> None:
        """Send the groups that are complete, and at their end StepGranted."""
        batch = self._ledger_writer.ledger.batches.get(self.step)
        if self.trainer is None or batch is None or self.all_sent or self._fleet.mode.holds(batch):
            return
        if self._filter is not None and not self._filter.decides(batch):
            return
        if not len(self._sent):
            if not self._fleet.versions.may_begin(batch):
                return
            self._sent = np.zeros(len(batch.prompts), np.bool_)
            self._told_early = np.zeros(len(batch.state), np.bool_)
        ready = np.nonzero(complete_groups(batch) & ~self._sent)[0]
        if len(ready):
            if not batch.committed:
                ready = self._without_small(batch, ready)
            self._send_groups(batch, ready, self.trainer)
        if self._sent.all():
            self._finish(batch, self.trainer)
        elif self._scope.job.scores_early:
            self._send_early(batch, self.trainer)

    def _without_small(self, batch: StepBatch, ready: np.ndarray) -> np.ndarray:
        """Drop the groups with too few scored siblings; returns the others."""
        scored = (batch.state.reshape(-1, batch.group_size)[ready] == S.SCORED).sum(axis=1)
        least = self._scope.job.algorithm.siblings_min
        for index in ready[scored < least].tolist():
            rows = batch.group_rows(index)
            rows = rows[batch.state[rows] == S.SCORED]
            if len(rows):
                self._ledger_writer.apply(ev.Dropped(batch.step, rows, f"fewer than {least} siblings have a reward"))
            self._sent[index] = True
        return ready[scored >= least]

    def _send_groups(self, batch: StepBatch, ready: np.ndarray, trainer: ActorAddress) -> None:
        wanted = S.COMMITTED if batch.committed else S.SCORED
        by_group = (batch.state == wanted).reshape(-1, batch.group_size)
        for indices in _portions(batch, ready):
            rows = (indices[:, None] * batch.group_size + np.arange(batch.group_size))[by_group[indices]]
            if len(rows):
                groups = _groups(self._scope.name, batch, rows.astype(np.int32))
                if self._scope.tell(trainer, groups) is not SendOutcome.QUEUED:
                    return
                self._ledger_writer.apply(ev.Granted(batch.step, rows.astype(np.int32), replay=batch.committed))
                self._fleet.mode.trainer_given(batch, rows)
            self._sent[indices] = True

    def _send_early(self, batch: StepBatch, trainer: ActorAddress) -> None:
        in_sent_group = np.repeat(self._sent, batch.group_size)
        rows = np.flatnonzero((batch.state == S.SCORED) & ~in_sent_group & ~self._told_early)
        for part in np.split(rows, _cuts(batch.length[rows])):
            if len(part):
                message = _early_samples(self._scope.name, batch, part.astype(np.int32))
                if self._scope.tell(trainer, message) is not SendOutcome.QUEUED:
                    return
                self._told_early[part] = True

    def _finish(self, batch: StepBatch, trainer: ActorAddress) -> None:
        wanted = S.COMMITTED if batch.committed else S.GRANTED
        there = batch.state.reshape(-1, batch.group_size) == wanted
        message = StepGranted(
            job=self._scope.name,
            step=batch.step,
            groups=int(there.any(axis=1).sum()),
            samples=int(there.sum()),
            dropped=int((batch.state == S.DROPPED).sum()),
        )
        self.all_sent = self._scope.tell(trainer, message) is SendOutcome.QUEUED


def _portions(batch: StepBatch, indices: np.ndarray) -> list[np.ndarray]:
    """``indices`` in runs that fit into one message each: at least one group, at most ``MESSAGE_TOKENS`` beyond it."""
    if not len(indices):
        return []
    tokens = batch.length.reshape(-1, batch.group_size)[indices].sum(axis=1)
    return np.split(indices, _cuts(tokens * (1 + batch.route_bytes / TOKEN.itemsize)))


def _cuts(tokens: np.ndarray) -> np.ndarray:
    """Indices at which to split items of ``tokens`` tokens each, so that every part fits into one message."""
    return np.flatnonzero(np.diff(np.cumsum(tokens) // MESSAGE_TOKENS)) + 1


def _groups(job: str, batch: StepBatch, rows: np.ndarray) -> GrantGroups:
    ragged = batch.ragged(rows, routes=True)
    return GrantGroups(
        job=job,
        step=batch.step,
        replay=batch.committed,
        **_grouped(batch, rows),
        lengths=ragged.lengths,
        tokens=ragged.tokens,
        logprobs=ragged.logprobs,
        versions=ragged.versions,
        finished=batch.finish[rows],
        rewards=batch.reward[rows],
        routes=ragged.routes,
    )


def _early_samples(job: str, batch: StepBatch, rows: np.ndarray) -> EarlySamples:
    ragged = batch.ragged(rows)
    return EarlySamples(job=job, step=batch.step, **_grouped(batch, rows), lengths=ragged.lengths, tokens=ragged.tokens)


def _grouped(batch: StepBatch, rows: np.ndarray) -> dict[str, np.ndarray]:
    """The columns that say to which prompts and siblings ``rows`` belong. Rows in increasing order."""
    indices, sizes = np.unique(rows // batch.group_size, return_counts=True)
    prompt_ids = [batch.prompt_ids[index] for index in indices.tolist()]
    return {
        "prompts": batch.prompts[indices],
        "prompt_lengths": np.array([len(ids) for ids in prompt_ids], np.int32),
        "prompt_ids": np.concatenate(prompt_ids),
        "sizes": sizes.astype(np.int32),
        "siblings": rows % batch.group_size,
    }
