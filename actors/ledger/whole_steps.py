"""Which groups and steps are whole: every sample is committed, scored or dropped."""

from __future__ import annotations

import numpy as np

from actors.ledger.batch import SampleState, StepBatch
from actors.ledger.ledger import Ledger


def newest_whole_step(ledger: Ledger) -> int:
    """The newest step up to which all steps are whole; -1 if the first one is not."""
    step = ledger.committed_steps - 1
    while (batch := ledger.batches.get(step + 1)) is not None and whole(batch):
        step += 1
    return step


def whole(batch: StepBatch) -> bool:
    """Whether every sample of ``batch`` is committed, scored or dropped."""
    return bool(complete_groups(batch).all())


def complete_groups(batch: StepBatch) -> np.ndarray:
    """bool[P]: every sibling is scored or dropped, or the batch is committed."""
    if batch.committed:
        return np.ones(len(batch.prompts), np.bool_)
    state = batch.state.reshape(-1, batch.group_size)
    return ((state == SampleState.SCORED) | (state == SampleState.DROPPED)).all(axis=1)
