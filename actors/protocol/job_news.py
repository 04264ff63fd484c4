"""What is told to the job and by it: what its scheduler needs and has made durable, and what that comes to.

scheduler ──NeedBatch, StepCommitted, CheckpointStored──▶ job ──JobEvent──▶ whoever runs the job
any actor of the job ──Trouble──▶ scheduler ──Trouble──▶ job ──JobEvent──▶ the terminal, ctl watch, events.jsonl
scheduler ──StepPlanned, WorkerReleased, WorkerWoken, GenerationEnded──▶ job ──▶ whoever starts and ends functions
"""

from __future__ import annotations

from typing import Any

import msgspec

from actors.core.message import Message, message


@message("jobs.need_batch")
class NeedBatch(Message):
    """Room for the batch of ``step`` under the staleness bound and the prompt look-ahead."""

    job: str
    step: int
    start: int = -1
    """First ordinal that is wanted; -1: steps have equal numbers of prompts, and it follows from the step."""
    count: int = 0
    """Number of prompts that are wanted; 0: as many as a step has. Fewer will do if ``more``."""
    more: bool = False
    """Whether the step has been issued, and these are further prompts of it."""


@message("jobs.step_committed")
class StepCommitted(Message):
    """A step is durable. ``metrics`` joins the trainer's and the scheduler's; a mean of nothing is NaN there."""

    job: str
    step: int
    replay: bool
    metrics: dict[str, float]
    dropped: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Reason → samples of this step that were dropped for it, the most frequent reasons first."""


@message("jobs.trouble")
class Trouble(Message):
    """Somebody has met what people must be told of. The scheduler passes it on to the job, which says each ``kind``
    once, and again whenever its count has doubled.
    """

    job: str
    kind: str
    """Name of this kind of trouble, such as ``reward_trial``; equal kinds are counted together."""
    text: str
    """One or two sentences for people: what was met first, where, and what to do."""
    count: int = 1
    """How often it was met since whoever says it last said so."""


@message("jobs.checkpoint_stored")
class CheckpointStored(Message):
    job: str
    step: int
    path: str
    final: bool
    """The trainer trains no more: the job is over."""
    stopped: bool = False
    """Its operator wanted that."""
    failed: str = ""
    """Reason why there are no further steps, if there should be."""


@message("jobs.step_planned")
class StepPlanned(Message):
    """The generation of ``step`` has been planned and begins; workers that are not named sleep through it."""

    job: str
    step: int
    workers: list[str]
    """Workers that the plan uses, of those that are there, and those that generate some of the step already."""
    more: int = 0
    """Number of functions that it wants beside them; they join the step when they are ready."""


@message("jobs.worker_released")
class WorkerReleased(Message):
    """``worker`` has nothing more to do in ``step`` and has been sent to sleep."""

    job: str
    worker: str
    step: int


@message("jobs.worker_woken")
class WorkerWoken(Message):
    """``worker`` has been woken for ``step``."""

    job: str
    worker: str
    step: int


@message("jobs.generation_ended")
class GenerationEnded(Message):
    """Every sample of ``step`` is generated."""

    job: str
    step: int


WorkerNews = StepPlanned | WorkerReleased | WorkerWoken | GenerationEnded
"""News of planned generation. Some may be lost as the job's actor dies: the next plan says all of it again."""


@message("jobs.event")
class JobEvent(Message):
    """Something has happened to the job.

    ``kind`` is ``begun``, ``step`` (fields: the row of metrics.jsonl), ``evaluation`` (that of eval.jsonl), ``state``
    (state, reason), ``checkpoint`` (step, path), ``trouble`` (trouble, message, count), ``message`` (message: for
    people), ``waiting`` (waiting_for: what the next batch waits for, empty when it has come), or ``ended``: the job is
    over and its record complete.
    """

    job: str
    kind: str
    fields: dict[str, Any]
    result: dict[str, Any]
    """What the run comes to with it: the object that ``run --json`` prints."""
