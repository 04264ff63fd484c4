"""News for the job, from its scheduler and its workers, and what the job in turn tells the process that runs it.

scheduler ──NeedBatch, StepCommitted, CheckpointStored──▶ job ──JobEvent──▶ the process that runs the job
any actor of the job ──Trouble──▶ scheduler ──Trouble──▶ job ──JobEvent──▶ the terminal, ctl watch, events.jsonl
scheduler ──StepPlanned, WorkerReleased, WorkerWoken, GenerationEnded──▶ job ──▶ the pool of functions
"""

from __future__ import annotations

from typing import Any

import msgspec

from actors.core.message import Message, message


@message("jobs.need_batch")
class NeedBatch(Message):
    """The scheduler has room for the batch of ``step`` under the staleness bound and the prompt look-ahead."""

    job: str
    step: int
    start: int = -1
    """First ordinal that is wanted; -1: steps have equal numbers of prompts, so the step tells it."""
    count: int = 0
    """Number of prompts that are wanted; 0: as many as a step has. Fewer will do if ``more``."""
    more: bool = False
    """Whether the step has been issued, and these are further prompts of it."""


@message("jobs.step_committed")
class StepCommitted(Message):
    """A step is committed, and durable. ``metrics`` are the trainer's and the scheduler's; a mean of nothing is NaN."""

    job: str
    step: int
    replay: bool
    metrics: dict[str, float]
    dropped: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Reason → samples of this step that were dropped for it, the most frequent reasons first."""


@message("jobs.trouble")
class Trouble(Message):
    """An actor has met trouble that people must be told of. The scheduler passes it on to the job.

    The job says each ``kind`` once, and again whenever its count has doubled.
    """

    job: str
    kind: str
    """Name of this kind of trouble, such as ``reward_trial``; equal kinds are counted together."""
    text: str
    """One or two sentences for people: what was met first, where, and what to do."""
    count: int = 1
    """Number of times that it was met since its sender last told of it."""


@message("jobs.checkpoint_stored")
class CheckpointStored(Message):
    job: str
    step: int
    path: str
    final: bool
    """Whether the trainer trains no more: the job is over."""
    stopped: bool = False
    """Whether the job is over because its operator wanted that."""
    failed: str = ""
    """Reason why there are no further steps, if there should be some."""


@message("jobs.step_planned")
class StepPlanned(Message):
    """The generation of ``step`` has been planned and begins; workers that are not named sleep through it."""

    job: str
    step: int
    workers: list[str]
    """Present workers that the plan uses, and those that generate some of the step already."""
    more: int = 0
    """Number of functions that the plan wants beside ``workers``; they join the step when they are ready."""


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
"""News of planned generation. If the job's actor dies some are lost; the next plan tells everything again."""


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
    """Summary of the run so far, this event included: the object that ``run --json`` prints."""
