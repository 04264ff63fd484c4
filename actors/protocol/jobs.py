"""What the job hears from its operator: the control server, the terminal, another actor.

operator ──PauseJob, ResumeJob, CancelJob, CheckpointJob, JobStatus──▶ job ──▶ scheduler
"""

from __future__ import annotations

import enum

from actors.core.message import Message, message


class JobState(enum.StrEnum):
    """Names a job's states: ``submitted → running ⇄ paused → stopping → finished | interrupted``; ``failed`` from any.

    A job that shares a training service may be ``queued`` before it runs.
    """

    SUBMITTED = "submitted"
    QUEUED = "queued"
    """No training service has room for it yet."""
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    """The last checkpoint is on its way; no further step is taken."""
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """Stopped by an operator after a checkpoint; can be resumed."""

    @property
    def over(self) -> bool:
        return self in (JobState.FINISHED, JobState.FAILED, JobState.INTERRUPTED)


@message("jobs.pause")
class PauseJob(Message):
    """Assign no more work; what runs goes on. Reply: JobReport."""

    job: str


@message("jobs.resume")
class ResumeJob(Message):
    """Go on with a paused job. Reply: JobReport."""

    job: str


@message("jobs.cancel")
class CancelJob(Message):
    """Finish the step under way, take a checkpoint, stop. Reply: JobReport, at once."""

    job: str


@message("jobs.checkpoint")
class CheckpointJob(Message):
    """Take a checkpoint after the step under way. Reply: CheckpointReport, once it is durable."""

    job: str


@message("jobs.checkpoint_report")
class CheckpointReport(Message):
    step: int
    path: str


@message("jobs.status")
class JobStatus(Message):
    """Say how the job stands. Reply: JobReport."""

    job: str


@message("jobs.report")
class JobReport(Message):
    job: str
    state: JobState
    step: int
    """Number of committed steps."""
    steps: int
    reason: str
    """Reason why the job failed or was interrupted; else empty."""
    waiting_for: str
    """What the job waits for, in words; empty while it moves."""
    checkpoint: str
    quiet_s: float = 0.0
    """Seconds for which no sample has moved."""
