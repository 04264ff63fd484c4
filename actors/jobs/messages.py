"""What a job hears from its operator. (What it hears from the scheduler stands in ``scheduler/messages.py``.)"""

from __future__ import annotations

import enum

from actors.core.message import Message, message


class JobState(enum.StrEnum):
    """``running`` and ``paused`` may change into each other; the last three are final."""

    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        return self in (JobState.FINISHED, JobState.INTERRUPTED, JobState.FAILED)


@message("jobs.pause")
class PauseJob(Message):
    """Ask: hand out no more samples; what runs goes on. Answered with JobStatus."""

    paused: bool


@message("jobs.stop")
class StopJob(Message):
    """Ask: finish the step, take a checkpoint, end as ``interrupted``. Answered at once with JobStatus."""


@message("jobs.checkpoint")
class TakeCheckpoint(Message):
    """Ask: a checkpoint after the running step. Answered with CheckpointMade once it is durable."""


@message("jobs.checkpoint_made")
class CheckpointMade(Message):
    step: int
    path: str


@message("jobs.query")
class QueryJob(Message):
    """Ask; answered with JobStatus."""


@message("jobs.status")
class JobStatus(Message):
    job: str
    state: JobState
    step: int
    """Steps committed."""
    steps: int
