"""What all parts of one job's fleet and scheduler share: the ledger, the workers, who serves, and how to say something.

Invariants
- Parts change the ledger through ``books`` and speak through ``tell``; neither is done behind the other parts' backs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from actors.core.context import Context
from actors.core.message import Message
from actors.fleet.workers import Worker, WorkerTable
from actors.ledger.errors import NotAccepted
from actors.ledger.journaled_ledger import JournaledLedger
from actors.ledger.ledger import Ledger
from actors.protocol.job_news import Trouble
from actors.protocol.metrics import Event, Span, Spans
from configs.limits import Limits
from configs.schema import JobConfig
from transport.address import ActorAddress
from transport.transport import SendOutcome


class JobScope:
    """The parts of a job's scheduler share this for as long as that scheduler lives."""

    def __init__(
        self,
        ctx: Context,
        job: JobConfig,
        journaled: JournaledLedger,
        workers: WorkerTable,
        services: dict[str, ActorAddress],
        metrics: ActorAddress | None,
        assign: Callable[[], None],
    ) -> None:
        """``services``: role → who has registered for it. ``assign`` hands out what is queued, as credit allows."""
        self.ctx = ctx
        self.job = job
        self.journaled = journaled
        self.workers = workers
        self.services = services
        self.assign = assign
        self._metrics = metrics
        self._untold: deque[Trouble] = deque(maxlen=job.limits.troubles_kept)
        """Troubles that nobody could be told of, since the job's actor is away."""

    @property
    def name(self) -> str:
        """The job's."""
        return self.job.name

    @property
    def limits(self) -> Limits:
        return self.job.limits

    @property
    def ledger(self) -> Ledger:
        return self.journaled.ledger

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

    def spans(self, track: str, spans: list[Span]) -> None:
        """Draw bars on a track of the trace."""
        if self._metrics is not None:
            self.tell(self._metrics, Spans(job=self.name, track=track, spans=spans))

    def trouble(self, kind: str, text: str, count: int = 1) -> None:
        """Have people told what has gone wrong; see ``Trouble``."""
        self.pass_on(Trouble(job=self.name, kind=kind, text=text, count=count))

    def pass_on(self, trouble: Trouble) -> None:
        """Tell the job's actor, as soon as there is one."""
        self._untold.append(trouble)
        self.tell_untold()

    def tell_untold(self) -> None:
        """Tell the job's actor, if there is one, what it could not be told before."""
        while self._untold and (job := self.services.get("job")) is not None:
            self.tell(job, self._untold.popleft())

    def check_job(self, job: str) -> None:
        if job != self.name:
            raise NotAccepted(f"this scheduler serves job {self.name!r}, not {job!r}")

    def speaker(self, name: str, sender: ActorAddress | None = None) -> Worker | None:
        """The worker of that name, if its present life speaks. ``sender``: who sent a message that came in a batch."""
        worker, sender = self.workers.by_name.get(name), sender or self.ctx.sender
        return worker if worker is not None and sender is not None and sender.peer == worker.address.peer else None
