"""What all parts of one job's fleet and scheduler share: ledger, workers, services, and ways to send messages.

Invariants
- Parts change the ledger only through ``ledger_writer.apply``, so the journal holds every change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from actors.core.context import Context
from actors.core.message import Message
from actors.fleet.workers import Worker, WorkerTable
from actors.ledger.ledger import Ledger
from actors.ledger.ledger_writer import LedgerWriter
from actors.protocol.failures import NotAccepted
from actors.protocol.job_news import Trouble
from actors.protocol.metrics import Event, Spans, TraceSpan
from configs.limits import Limits
from configs.schema import JobConfig
from transport.address import ActorAddress
from transport.transport import SendOutcome

Rows = dict[int, np.ndarray]
"""Rows of batches, by step."""


class FleetOwner(Protocol):
    """The owner of a fleet is told what becomes of samples, and knows which versions workers may not have yet."""

    def finished(self, rows: Rows) -> None:
        """These samples have all their tokens."""
        ...

    def turns_over(self, rows: Rows) -> None:
        """The turns of these episodes are over."""
        ...

    def settled(self, step: int) -> None:
        """Samples of ``step`` were scored or dropped."""
        ...

    def held_back(self) -> int | None:
        """The newest version that workers may be told of while it is being evaluated; None: no such limit."""
        ...


class JobScope:
    """The parts of a job's scheduler share this scope for as long as that scheduler lives."""

    def __init__(
        self,
        ctx: Context,
        job: JobConfig,
        ledger_writer: LedgerWriter,
        workers: WorkerTable,
        services: dict[str, ActorAddress],
        metrics: ActorAddress | None,
        assign: Callable[[], None],
    ) -> None:
        """``services``: role → address registered for it. ``assign``: hands out queued samples as workers have room."""
        self.ctx = ctx
        self.job = job
        self.ledger_writer = ledger_writer
        self.workers = workers
        self.services = services
        self.assign = assign
        self._metrics = metrics
        self._untold: deque[Trouble] = deque(maxlen=job.limits.troubles_kept)
        """Troubles that could not be reported yet, since the job's actor is away."""

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.job.name

    @property
    def limits(self) -> Limits:
        return self.job.limits

    @property
    def ledger(self) -> Ledger:
        return self.ledger_writer.ledger

    def tell(self, address: ActorAddress, what: Message) -> SendOutcome:
        return self.ctx.ref(address).tell(what)

    def event(self, name: str, **fields: float | str) -> None:
        """Write an event into the log and events.jsonl."""
        self.ctx.log.info(name, **fields)
        self.record(name, **fields)

    def record(self, name: str, **fields: float | str) -> None:
        """Write an event for checkers alone, into events.jsonl and not into the log."""
        if self._metrics is not None:
            self.tell(self._metrics, Event(job=self.name, name=name, fields=dict(fields)))

    def spans(self, track: str, spans: list[TraceSpan]) -> None:
        """Draw bars on a track of the trace."""
        if self._metrics is not None:
            self.tell(self._metrics, Spans(job=self.name, track=track, spans=spans))

    def trouble(self, kind: str, text: str, count: int = 1) -> None:
        """Report to the users what has gone wrong; see ``Trouble``."""
        self.pass_on(Trouble(job=self.name, kind=kind, text=text, count=count))

    def pass_on(self, trouble: Trouble) -> None:
        """Tell the job's actor of a trouble, as soon as there is one."""
        self._untold.append(trouble)
        self.tell_untold()

    def tell_untold(self) -> None:
        """Tell the job's actor, if there is one, of the troubles that are still unreported."""
        while self._untold and (job := self.services.get("job")) is not None:
            self.tell(job, self._untold.popleft())

    def check_job(self, job: str) -> None:
        if job != self.name:
            raise NotAccepted(f"this scheduler serves job {self.name!r}, not {job!r}")

    def speaker(self, name: str, sender: ActorAddress | None = None) -> Worker | None:
        """The worker ``name``, if the message is from its present life. ``sender``: for a message from a batch."""
        worker, sender = self.workers.by_name.get(name), sender or self.ctx.sender
        return worker if worker is not None and sender is not None and sender.peer == worker.address.peer else None
