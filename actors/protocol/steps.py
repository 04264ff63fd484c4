"""How the trainer and the scheduler walk through a step.

trainer ──OpenStep──▶ scheduler ──LeaseGroups …, StepLeased──▶ trainer ──CommitStep──▶ scheduler ──Committed──▶ trainer
and CheckpointTaken, from the trainer, whenever a checkpoint is on disk
"""

from __future__ import annotations

import numpy as np

from actors.core.message import Message, message
from transport.address import ActorAddress


@message("scheduler.open_step")
class OpenStep(Message):
    """The trainer is ready to consume step ``step``. A step at or below the committed frontier is a replay:

    the same samples are leased again, bit for bit, because the trainer restarted from an older checkpoint.
    Opening a step implies that every lease of an earlier incarnation of the trainer is void. Reply: Acknowledged.
    """

    job: str
    step: int
    trainer: ActorAddress


@message("trainer.step_leased")
class StepLeased(Message):
    """Every group of the step has been sent; dropped samples are named by the ledger and are not among them."""

    job: str
    step: int
    groups: int
    samples: int
    dropped: int
    never: bool = False
    """There is no such step, and none after it: the data has ended, or the operator wants the job to."""


@message("scheduler.commit_step")
class CommitStep(Message):
    """The optimizer has stepped on exactly ``samples`` samples; durable before the reply. Idempotent by (job, step)."""

    job: str
    step: int
    trainer: ActorAddress
    prompts: np.ndarray  # int64[n]
    siblings: np.ndarray  # int32[n]
    policy_version: int
    """The version that this step produced: step + 1."""
    metrics: dict[str, float]


@message("scheduler.committed")
class Committed(Message):
    step: int
    stop: bool
    """No further step will be issued: finish, checkpoint, and say so."""
    checkpoint: bool
    """Take a checkpoint now."""


@message("scheduler.checkpoint_taken")
class CheckpointTaken(Message):
    """A durable checkpoint exists from which training can go on at step ``step``. Reply: Acknowledged."""

    job: str
    step: int
    path: str
    final: bool = False
    """The trainer has been told to stop, by this scheduler or a former one, and trains no more."""
