"""Tells how a job's run goes: progress maps to listeners, and events into events.jsonl.

job ──WorkerNews─▶ JobListener ─▶ whoever starts and ends functions
job ──JobEvent──▶ JobListener ─▶ JobRun ─┐
                                 JobTree ┴─ say ────▶ listeners: the terminal, ctl watch, fault plans
                                         └─ record ─▶ the job's metrics actor ─▶ events.jsonl
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import structlog

from actors.core.actor import Actor, handles
from actors.jobs.evaluation_rows import line_of as evaluation_line
from actors.protocol.job_news import GenerationEnded, JobEvent, StepPlanned, WorkerNews, WorkerReleased, WorkerWoken
from actors.protocol.metrics import Event
from transport.transport import SendOutcome

if TYPE_CHECKING:
    from actors.core.system import ActorSystem
    from supervisors.tree.supervisor import SupervisionEvent

OnProgress = Callable[[Mapping[str, Any]], None]

log = structlog.get_logger("headrace.job")


class JobListener(Actor):
    """Receives what the actor of a job says, in each of its lives, and calls the code that runs the job."""

    def __init__(
        self, hear: Callable[[JobEvent], None], hear_workers: Callable[[WorkerNews], None] = lambda news: None
    ) -> None:
        self._hear = hear
        self._hear_workers = hear_workers

    @handles(JobEvent)
    async def event(self, event: JobEvent) -> None:
        try:
            self._hear(event)
        except Exception:  # a listener may fail; the next event is told all the same
            log.exception("an event of a job was not told to the end", job=event.job, kind=event.kind)

    @handles(StepPlanned, WorkerReleased, WorkerWoken, GenerationEnded)
    async def worker_news(self, news: WorkerNews) -> None:
        self._hear_workers(news)


class JobNews:
    """Tells what becomes of one job."""

    def __init__(self, system: ActorSystem, job: str) -> None:
        self._system = system
        self._job = job
        self._listeners: list[OnProgress] = []

    def subscribe(self, listener: OnProgress) -> Callable[[], None]:
        """Call ``listener`` with every progress map from now on; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def say(self, **progress: Any) -> None:
        """Give listeners a progress map: ``message`` is for people, ``state`` and ``step`` for all."""
        for listener in list(self._listeners):
            listener(progress)

    def tell(self, event: JobEvent) -> None:
        """Give listeners an event of the job's actor as a progress map."""
        if event.kind == "step":
            self.say(**{**event.fields, "step": int(event.fields["step"] or 0) + 1})
        elif event.kind == "evaluation":
            line = evaluation_line(event.fields)
            self.say(message=line, evaluation=line)
        elif event.kind == "state":
            self.say(state=event.fields["state"])
        elif event.kind == "trouble":
            self.say(**{**event.fields, "message": f"warning: {event.fields['message']}"})
        elif event.kind in ("message", "waiting"):
            self.say(**event.fields)

    def record(self, name: str, **fields: float | str) -> None:
        """Write an event to events.jsonl; while the metrics actor is away, to the log."""
        metrics = self._system.ref(self._system.address(f"metrics.{self._job}"))
        outcome = metrics.tell(Event(job=self._job, name=name, fields=dict(fields)))
        if outcome is not SendOutcome.QUEUED:
            log.info("an event is not recorded", job=self._job, name=name, outcome=outcome.name, fields=fields)


def failure_in_words(event: SupervisionEvent) -> str:
    """Words for people on a child that failed, with the error that ended it, if it has named one."""
    if event.kind == "start_failed":
        return f"{event.child} did not start: {event.reason or event.detail}"
    why = f": {event.reason}" if event.reason else ""
    return f"{event.child} ended ({event.cause}{why}); starting it again {event.detail}"
