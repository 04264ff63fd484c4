"""Which worker's part each sample of a planned step belongs to.

    StepPlan.parts ─▶ owner of each row ─▶ GroupView.kept_for ─▶ policies.assign
    a function that the plan has started registers ─▶ it gets one of the parts that are kept for new functions
    a cut ─▶ rows get another owner                 a worker dies ─▶ any worker may take its rows, until it is back

Invariants
- Any worker may take a part whose worker is not there. A part for a new function is kept until ``waits_until_s``.
- Workers that join later may take all samples that have not been handed out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from actors.ledger.batch import SampleState, StepBatch
from actors.policies.assigning.view import GroupView
from actors.policies.planning.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class Queued:
    """The queued samples of a step are kept for these workers."""

    own: frozenset[str]
    """Workers that some samples are kept for."""
    anybodys: int
    """Number of samples that any worker may take, since their owner is not there or they have none."""
    waiting: int
    """Number of samples that are kept for functions which are not there yet."""


class StepParts:
    """The parts say which worker owns each row of one step."""

    def __init__(self, batch: StepBatch, prompts: np.ndarray, plan: StepPlan, waits_until_s: dict[str, float]) -> None:
        """``prompts``: positions in the batch of the planned prompts. ``waits_until_s``: function that is not there
        yet → time until which its part is kept.
        """
        self.names = list(plan.parts)
        self._planned = bool(plan.parts)
        self.joined: set[str] = set()
        self._waits_until_s = waits_until_s
        self._owner = np.full(len(batch), -1, np.int32)
        by_prompt = self._owner.reshape(-1, batch.group_size)
        for i, positions in enumerate(plan.parts.values()):
            by_prompt[prompts[positions]] = i
        self._owner[batch.state != SampleState.QUEUED] = -1

    @property
    def longest(self) -> str | None:
        """The worker that has the longest part; None if the plan has no parts."""
        return self.names[0] if self._planned else None

    def join(self, worker: str) -> bool:
        """Let a worker that was not there when the step was planned take part; True if a part was kept for it."""
        for name in self._waits_until_s:
            del self._waits_until_s[name]
            self.names[self.names.index(name)] = worker
            return True
        if worker not in self.names:
            self.joined.add(worker)
        return False

    def wait_no_longer(self, now: float) -> None:
        """Give up functions that should be there by now; any worker may take their parts."""
        self._waits_until_s = {name: until_s for name, until_s in self._waits_until_s.items() if now < until_s}

    def give(self, rows: np.ndarray, worker: str) -> None:
        """Make ``worker`` the owner of ``rows``."""
        self._owner[rows] = self._index(worker)

    def rows(self, worker: str) -> np.ndarray:
        """int[n] rows that ``worker`` owns, including ended ones."""
        return np.flatnonzero(self._owner == self.names.index(worker)) if worker in self.names else np.empty(0, np.intp)

    def _index(self, worker: str) -> int:
        if worker not in self.names:
            self.names.append(worker)
        return self.names.index(worker)

    # ------------------------------------------------------------ what is queued

    def queued(self, batch: StepBatch, there: Collection[str]) -> Queued:
        """Count which workers the queued samples are kept for; ``there``: the workers that could take some."""
        owners = self._owner[batch.state == SampleState.QUEUED]
        counts = dict(
            zip(["", *self.names], np.bincount(owners + 1, minlength=len(self.names) + 1).tolist(), strict=True)
        )
        own = frozenset(name for name, count in counts.items() if count and name in there)
        waiting = sum(counts[name] for name in self._waits_until_s)
        kept = sum(counts[name] for name in own)
        return Queued(own, len(owners) - kept - waiting, waiting)

    def mark(self, groups: list[GroupView], there: Collection[str]) -> list[GroupView]:
        """The queued groups, marked with the workers they are kept for, without those that wait for a function."""
        kept_for = [frozenset({name}) | self.joined if name in there else frozenset[str]() for name in self.names]
        kept_for.append(frozenset())  # for rows without an owner, at -1
        waiting = {self.names.index(name) for name in self._waits_until_s}
        return [
            part._replace(kept_for=kept_for[owner])
            for group in groups
            for owner, part in self._by_owner(group)
            if owner not in waiting
        ]

    def _by_owner(self, group: GroupView) -> list[tuple[int, GroupView]]:
        owners = self._owner[group.rows]
        if len(owners) == 1 or (owners == owners[0]).all():
            return [(int(owners[0]), group)]
        return [(owner, group.part(group.rows[owners == owner])) for owner in np.unique(owners).tolist()]
