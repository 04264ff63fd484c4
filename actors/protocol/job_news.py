"""What the scheduler tells the job: what it needs from it, and what is durable.

scheduler ──NeedBatch, StepCommitted, CheckpointStored──▶ job
"""

from __future__ import annotations

from actors.core.message import Message, message


@message("jobs.need_batch")
class NeedBatch(Message):
    """Room for the batch of ``step`` under the staleness bound and the prompt look-ahead."""

    job: str
    step: int


@message("jobs.step_committed")
class StepCommitted(Message):
    """A step is durable. ``metrics`` joins the trainer's and the scheduler's."""

    job: str
    step: int
    replay: bool
    metrics: dict[str, float]


@message("jobs.checkpoint_stored")
class CheckpointStored(Message):
    job: str
    step: int
    path: str
    final: bool
    """The trainer trains no more: the job is over."""
    stopped: bool = False
    """Its operator wanted that."""
