"""How a job's workers share its work: what a mode of a fleet hears, and what it answers.

    hears                                                  answers
    registered, gone        a worker's life begins, ends   mark         which workers queued groups are kept for
    served, asleep          what a worker says of itself   off_duty     which workers get no work for now
    look, handed_out        something may have changed     may_load     which workers are told of new versions
    issued, committed       a step's beginning, its end    pending_max  how much more than it runs a worker is given
    trainer_opened, _given  the trainer and its step       holds        whether the trainer has to wait for groups

Invariants
- A mode decides which worker generates what, which ones sleep and what moves, and nothing else. Samples change workers
  only through the ledger, so a mode's memory, which is lost with its scheduler, costs time but no sample.
- Its records of a worker begin with ``registered`` and end with ``gone``: a later worker of that name finds none.
- No code outside ``actors/fleet/modes`` asks which mode it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from actors.fleet.length_ranking import LengthRanking
from actors.fleet.scope import JobScope
from actors.fleet.versions import Versions
from actors.fleet.workers import Worker
from actors.ledger.batch import StepBatch
from actors.policies.assigning.view import GroupView, WorkerView
from actors.protocol.batches import IssueBatch
from actors.protocol.workers import RegisterWorker, WorkerAsleep, WorkerVersion


class Mode:
    """A mode decides how the workers of a job share its work, for one life of its scheduler.

    The methods here do nothing special; a new mode overrides those that it needs. A mode in which the second of two
    workers rests, for example, sets ``worker.off_duty`` when that is ``registered``. A step of two samples is then::

        registered(a), registered(b)   b is off duty
        issued(step 0)                 its prompts are known
        look                           the mode could put b on duty now
        mark(groups of step 0)         unchanged: policies.assign gives both samples to a, which alone is on duty
        handed_out                     the mode could take some from a again now
        look, handed_out               … with each sample that ends, each version that is served, and each tick
        holds(step 0)                  no: the trainer gets each group once it is complete
        trainer_given, committed       what was learned becomes columns of the step's row
        gone(b)                        nothing is left of b

    ``make.py`` names all modes; ``tests/actors/fleet/modes/test_modes.py`` has one more.
    """

    newest_epoch_only: ClassVar[bool] = False
    """Whether a prompt's expected length is that of its newest training epoch alone, not an average over epochs."""
    keeps_parts: bool = False
    """Whether groups wait for the workers that they are kept for, as long as one of those is there."""
    pending_max: int | None = None
    """Most samples that a worker gets beyond those that its engine runs; None: as many as it has slots."""

    def __init__(self, scope: JobScope, versions: Versions, ranking: LengthRanking) -> None:
        self._scope, self._versions, self._ranking = scope, versions, ranking

    # ------------------------------------------------------------ workers

    def registered(self, worker: Worker, offer: RegisterWorker) -> None:
        """A life of a worker has begun to serve the job."""

    def gone(self, worker: Worker) -> None:
        """A life of a worker has ended for the job."""

    def served(self, worker: Worker, news: WorkerVersion) -> None:
        """A worker has loaded a version."""

    def asleep(self, worker: Worker, news: WorkerAsleep) -> None:
        """A worker sleeps, or is awake, as it was told."""

    def may_load(self, worker: Worker) -> bool:
        """Whether a worker is told of new versions."""
        return True

    # ------------------------------------------------------------ who gets what

    def look(self, now: float) -> None:
        """Something may have changed, and work is about to be handed out unless the job is paused. Often called."""

    def mark(self, step: int, groups: list[GroupView], workers: list[WorkerView]) -> list[GroupView]:
        """The queued ``groups`` of ``step``, marked with the workers they are kept for; a group that is left out waits.

        ``workers``: the workers that may get work.
        """
        return groups

    def handed_out(self, now: float) -> None:
        """All that could be handed out has been."""

    # ------------------------------------------------------------ steps and the trainer

    def issued(self, batch: IssueBatch) -> None:
        """The prompts of a step are there."""

    def holds(self, batch: StepBatch) -> bool:
        """Whether groups of ``batch`` are held back from the trainer, which has it open."""
        return False

    def trainer_opened(self, step: int) -> None:
        """The trainer has opened this step, and has none of its samples yet; -1: it has no step open."""

    def trainer_given(self, batch: StepBatch, rows: np.ndarray) -> None:
        """The trainer has been given ``rows`` to train."""

    def committed(self, batch: StepBatch, trainer: Mapping[str, float]) -> dict[str, float]:
        """A step is committed, with the ``trainer``'s metrics of it; returns columns for metrics.jsonl."""
        return {}
