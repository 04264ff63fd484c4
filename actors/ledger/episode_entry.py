"""How episodes enter the ledger: their environments speak, the model answers, and in the end there is a reward.

    EpisodesBegun   a life of the environment begins; whatever stands in the row stays
    Turned          waiting ─▶ queued: the environment's tokens are there, marked, and a turn of the model is due
    (a turn ends as any hand-out does, and the row waits again)
    EpisodeCut      ─▶ waiting: the end of a row is void
    EpisodesEnded   ─▶ scored: the row ends with the model's last token

Invariants
- What an event says is checked against every row before any row changes.
- A row is empty, or begins with FRESH; between two turns of the model there is a token of the environment.
- A turn ends within the bounds of its batch: the row's, the turn's, and the model's tokens of all turns together.
- Tokens that the model has said leave a row by a cut only, and are counted then.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from actors.ledger import events as ev
from actors.ledger.batch import IN_FLIGHT, SampleState, StepBatch
from actors.ledger.episode_ends import episode_end
from actors.ledger.errors import IllegalTransition
from actors.ledger.outcome import Counters, Outcome, let_wait
from actors.protocol.episodes import ENVIRONMENT, FRESH, EpisodeLimits
from actors.protocol.evaluations import is_evaluation
from actors.protocol.marks import turn_starts, whole_turns

S = SampleState
_LIVE = (S.QUEUED, *IN_FLIGHT, S.WAITING)


class EpisodeLedger(Protocol):
    """Stands for the part of the ledger that this file needs."""

    @property
    def counters(self) -> Counters: ...

    def batch_of(self, step: int) -> StepBatch | None:
        """The batch of ``step``; None where its events have been pruned."""
        ...

    def end_hand_outs(self, batch: StepBatch, rows: np.ndarray, outcome: Outcome) -> None: ...


class EpisodeEntry:
    """Folds the events of episodes into the ledger."""

    def __init__(self, ledger: EpisodeLedger) -> None:
        self._ledger = ledger

    def begin(self, event: ev.EpisodesBegun) -> Outcome:
        """Count a life of each environment."""
        if (batch := self._ledger.batch_of(event.step)) is not None:
            _limits_of(batch)
            batch.require(event.rows, _LIVE, "begin the episode of")
            batch.lives[event.rows] += 1
        return Outcome()

    def turn(self, event: ev.Turned) -> Outcome:
        """Enter what the environments have said, and queue the model's turns."""
        batch = self._ledger.batch_of(event.step)
        if batch is None:
            return Outcome()
        _check_turn(batch, event)
        rows, parts = event.rows, np.split(event.tokens, np.cumsum(event.counts)[:-1])
        for row, fresh, tokens in zip(rows.tolist(), event.fresh.tolist(), parts, strict=True):
            batch.put_marked(row, tokens, FRESH if fresh else ENVIRONMENT)
        batch.limit[rows] = event.limits
        batch.turns[rows] += 1
        batch.attempts[rows] = 0
        batch.former[rows] = -1
        batch.state[rows] = S.QUEUED
        return Outcome(queued={batch.step: rows})

    def cut(self, event: ev.EpisodeCut) -> Outcome:
        """Cut off the ends of rows. A turn under way ends, and keeps what it has said before the cut."""
        batch = self._ledger.batch_of(event.step)
        if batch is None:
            return Outcome()
        _limits_of(batch)
        batch.require(event.rows, _LIVE, "cut")
        if len(event.lengths) != len(event.rows):
            raise IllegalTransition(f"step {batch.step}: {len(event.lengths)} lengths for {len(event.rows)} episodes")
        if ((event.lengths < 0) | (event.lengths > batch.length[event.rows])).any():
            raise IllegalTransition(f"step {batch.step}: an episode cannot be cut to more than it has, nor below 0")
        outcome = Outcome()
        self._ledger.end_hand_outs(batch, event.rows, outcome)
        for row, length in zip(event.rows.tolist(), event.lengths.tolist(), strict=True):
            self._cut(batch, row, length)
        let_wait(batch, event.rows, outcome)
        return outcome

    def end(self, event: ev.EpisodesEnded) -> Outcome:
        """Score episodes; each keeps what the model has said, and no word of the environment behind it."""
        batch = self._ledger.batch_of(event.step)
        if batch is None:
            return Outcome()
        _limits_of(batch)
        batch.require(event.rows, _LIVE, "end the episode of")
        batch.check_rewards(event.rows, event.rewards, event.parts)
        outcome = Outcome()
        self._ledger.end_hand_outs(batch, event.rows, outcome)
        for row in event.rows.tolist():
            marks, under_way = batch.marks(row), batch.state[row] != S.WAITING
            mid_turn = bool(under_way and event.keeps_turn and marks[-1] >= 0)
            self._cut(batch, row, whole_turns(marks, under_way=under_way and not mid_turn))
            batch.finish[row] = episode_end(batch, row, event.cause, mid_turn=mid_turn)
        batch.enter_rewards(event.rows, event.rewards, event.parts)
        return outcome

    def _cut(self, batch: StepBatch, row: int, length: int) -> None:
        marks = batch.marks(row)
        if not is_evaluation(batch.step):
            self._ledger.counters.tokens_discarded += int(np.count_nonzero(marks[length:] >= 0))
        batch.length[row] = length
        batch.turns[row] = len(turn_starts(marks[:length]))


def _limits_of(batch: StepBatch) -> EpisodeLimits:
    if batch.episodes is None:
        raise IllegalTransition(f"step {batch.step}: its samples are no episodes")
    return batch.episodes


def _check_turn(batch: StepBatch, event: ev.Turned) -> None:
    limits, rows = _limits_of(batch), event.rows
    batch.require(rows, (S.WAITING,), "let the model take its turn in")
    columns = (event.offsets, event.fresh, event.counts, event.limits)
    if any(len(column) != len(rows) for column in columns) or (event.counts < 1).any():
        raise IllegalTransition(f"step {batch.step}: turns of {len(rows)} episodes have columns that do not fit")
    if event.counts.sum() != len(event.tokens):
        raise IllegalTransition(f"step {batch.step}: {event.counts.sum()} tokens are told, {len(event.tokens)} come")
    if (wrong := event.offsets != batch.length[rows]).any():
        at, ends = int(event.offsets[wrong][0]), int(batch.length[rows][wrong][0])
        raise IllegalTransition(f"step {batch.step}: a turn begins at {at}, and its episode ends at {ends}")
    if ((event.offsets == 0) & (event.fresh == 0)).any():
        raise IllegalTransition(f"step {batch.step}: the first context of an episode is a fresh one")
    starts = event.offsets + event.counts
    said = np.array([np.count_nonzero(batch.marks(row) >= 0) for row in rows.tolist()], np.int32)
    most = np.minimum(batch.width - starts, np.minimum(limits.turn_tokens, batch.sampling.max_tokens - said))
    if ((event.limits <= starts) | (event.limits > starts + most)).any() or (
        batch.turns[rows] >= limits.turns_max
    ).any():
        raise IllegalTransition(f"step {batch.step}: a turn is beyond {limits}, or {batch.sampling.max_tokens} tokens")
