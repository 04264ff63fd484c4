"""Dynamic sampling: a step keeps the first P groups whose rewards differ, and asks for prompts until it has them.

    all groups settled ─▶ P with spread? ─ yes ─▶ the others are dropped: no_signal, surplus ─▶ grants
                              └ no ─▶ NeedBatch(more) ─▶ BatchExtended ─▶ … ─▶ all groups settled
                                        └ after filter_batches · P prompts, or all data: trains the groups that it has

Invariants
- "First" means in prompt order, not in order of completion, and nothing is decided before all groups are settled: equal
  rewards give an equal step, whatever was slow or died. The number of prompts asked for follows from the ledger alone.
- A decision is in the ledger, as drops; the next life of the scheduler completes a half-entered one.
Source: dynamic sampling of DAPO, Yu et al. 2025, section 3.2.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from actors.fleet.scope import JobScope
from actors.ledger import events as ev
from actors.ledger.batch import SampleState, StepBatch
from actors.ledger.whole_steps import whole
from actors.protocol.job_news import NeedBatch, Trouble

NO_SIGNAL: Final = "no_signal: all siblings have the same reward"
SURPLUS: Final = "surplus: enough prompts before it had a signal"
FILTERED: Final = (NO_SIGNAL, SURPLUS)
"""Reasons of drops that are not failures."""
_SCORED: Final = (SampleState.SCORED, SampleState.GRANTED)


class SpreadFilter:
    """Decides which groups a job with ``algorithm.filter: spread`` trains."""

    def __init__(self, scope: JobScope) -> None:
        self._scope = scope
        algorithm = scope.job.algorithm
        self._wanted = algorithm.prompts_per_step
        self._prompts_max = algorithm.filter_batches * self._wanted
        self._decided = -1
        self._asked = (-1, 0, 0.0)
        self.data_ended = False
        """Whether all prompts have been issued."""

    def decides(self, batch: StepBatch) -> bool:
        """Whether it is decided which groups ``batch`` trains; if too few have a signal, asks for more prompts."""
        if batch.committed or batch.step == self._decided:
            return True
        if not whole(batch):
            return False
        signal = with_spread(batch)
        kept = int(signal.sum())
        if kept < self._wanted and len(batch.prompts) < self._prompts_max and not self.data_ended:
            self._ask_more(batch, kept)
            return False
        if kept < self._wanted:
            self._tell_short(batch, kept)
        surplus = signal & (np.cumsum(signal) > self._wanted)
        self._drop(batch, equal_rewards(batch), NO_SIGNAL)
        self._drop(batch, surplus, SURPLUS)
        self._decided = batch.step
        return True

    def _ask_more(self, batch: StepBatch, kept: int) -> None:
        """Ask for as many prompts as needed at the share with a signal so far; again after a while without answer."""
        now, issued = self._scope.ctx.now(), len(batch.prompts)
        step, prompts, at_s = self._asked
        job = self._scope.services.get("job")
        asked = (step, prompts) == (batch.step, issued) and now - at_s <= self._scope.limits.ask_timeout_s
        if asked or job is None:
            return
        self._asked = (batch.step, issued, now)
        missing = self._wanted - kept
        count = min(-(-missing * issued // kept) if kept else self._wanted, self._wanted, self._prompts_max - issued)
        start = self._scope.ledger.next_prompt
        need = NeedBatch(job=self._scope.name, step=batch.step, start=start, count=count, more=True)
        self._scope.tell(job, need)

    def ask_again(self) -> None:
        """Forget that prompts were asked for, since the job, or their source, has begun to serve."""
        self._asked = (-1, 0, 0.0)

    def _drop(self, batch: StepBatch, which: np.ndarray, reason: str) -> None:
        rows = np.flatnonzero(np.repeat(which, batch.group_size) & (batch.state == SampleState.SCORED))
        if len(rows):
            self._scope.ledger_writer.apply(ev.Dropped(batch.step, rows.astype(np.int32), reason))

    def _tell_short(self, batch: StepBatch, kept: int) -> None:
        why = "the data have ended" if self.data_ended else "algorithm.filter_batches allows no more"
        text = (
            f"step {batch.step} trains {kept} of {self._wanted} groups: of {len(batch.prompts)} prompts no more had "
            f"rewards that differ, and {why}"
        )
        self._scope.event("filter_fell_short", step=batch.step, kept=kept, prompts=len(batch.prompts))
        self._scope.pass_on(Trouble(job=self._scope.name, kind="filter_fell_short", text=text))


def with_spread(batch: StepBatch) -> np.ndarray:
    """Groups (bool[P]) in which at least two siblings have a reward, and the rewards differ."""
    least, most, count = _extremes(batch)
    return (count >= 2) & (most > least)


def equal_rewards(batch: StepBatch) -> np.ndarray:
    """Groups (bool[P]) in which at least two siblings have a reward, and all rewards are equal."""
    least, most, count = _extremes(batch)
    return (count >= 2) & (most == least)


def _extremes(batch: StepBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Least and greatest reward, and number of rewards, of each group."""
    shape = (len(batch.prompts), batch.group_size)
    scored = np.isin(batch.state, _SCORED).reshape(shape)
    rewards = batch.reward.reshape(shape)
    least = np.where(scored, rewards, np.inf).min(axis=1)
    return least, np.where(scored, rewards, -np.inf).max(axis=1), scored.sum(axis=1)


def filtered_columns(batch: StepBatch) -> dict[str, float]:
    """Columns of a filtered step's row: the numbers of groups that were dropped as no signal and as surplus."""
    groups = {(row // batch.group_size, reason) for row, reason in batch.drop_reasons.items()}
    found = [reason for _, reason in groups]
    return {"no_signal": found.count(NO_SIGNAL), "surplus": found.count(SURPLUS)}
