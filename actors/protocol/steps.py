"""How the trainer and the scheduler walk through a step.

trainer ──OpenStep──▶ scheduler ──GrantGroups …, StepGranted──▶ trainer ──CommitStep──▶ scheduler ──Committed──▶ trainer
and CheckpointTaken, from the trainer, whenever a checkpoint is on disk
"""

from __future__ import annotations

import numpy as np

from actors.core.message import Message, message
from transport.address import ActorAddress


@message("scheduler.open_step")
class OpenStep(Message):
    """The trainer is ready to consume ``step``. Reply: Acknowledged.

    A step at or below the committed frontier is a replay: the same samples are granted again, bit for bit, because the
    trainer restarted from an older checkpoint. Every grant to an earlier incarnation of the trainer is void.
    """

    job: str
    step: int
    trainer: ActorAddress


@message("trainer.step_granted")
class StepGranted(Message):
    """Every group of the step has been sent: ``groups`` with ``samples`` in all; ``dropped`` samples are missing."""

    job: str
    step: int
    groups: int
    samples: int
    dropped: int
    never: bool = False
    """Whether there is no such step, and none after it: the data has ended, or the operator has the job end."""


@message("scheduler.commit_step")
class CommitStep(Message):
    """The optimizer has stepped on exactly these samples. Idempotent by (job, step). Reply: Committed, once durable."""

    job: str
    step: int
    trainer: ActorAddress
    prompts: np.ndarray  # int64[n]
    siblings: np.ndarray  # int32[n]
    policy_version: int
    """Version that this step produced: step + 1."""
    metrics: dict[str, float]


@message("scheduler.committed")
class Committed(Message):
    step: int
    stop: bool
    """Whether no further step will be issued: finish, take a checkpoint, and say so."""
    checkpoint: bool
    """Whether to take a checkpoint now."""
    spared: tuple[int, ...] = ()
    """Steps of older checkpoints that are not to be deleted: of the best one, and of those being evaluated."""


@message("scheduler.checkpoint_taken")
class CheckpointTaken(Message):
    """A checkpoint is durable, from which training can go on at step ``step``. Reply: Acknowledged."""

    job: str
    step: int
    path: str
    final: bool = False
    """Whether the trainer has been told to stop, by this scheduler or a former one, and trains no more."""
