"""Engines that sleep at times, as a seeding window or the plan of a step tells them to."""

from __future__ import annotations

from dataclasses import dataclass

from actors.fleet.scope import JobScope
from actors.fleet.workers import Worker
from actors.protocol.work import SetAsleep
from actors.protocol.workers import RegisterWorker, WorkerAsleep
from transport.transport import SendOutcome


@dataclass(slots=True)
class EngineRest:
    """The record says for one life of a worker whether its engine sleeps, and how long sleeping and waking take."""

    beside_trainer: bool = False
    """Whether the worker is on the trainer's machine."""
    told: bool | None = None
    """Whether the worker was last told to sleep (True) or to wake (False); None: neither."""
    told_s: float | None = None
    """Time at which the worker was told; None once it has answered."""
    sleeps_s: float = 0.0
    """Seconds from the last order to sleep until it slept."""
    wakes_s: float = 0.0
    """Seconds from the last order to wake until it was awake."""
    asleep: bool = False
    """Whether the worker has confirmed that it sleeps."""

    def tell(self, asleep: bool, now: float) -> None:
        """Note that it has been told to sleep, or to wake."""
        self.told, self.told_s, self.asleep = asleep, now, False

    def hear(self, asleep: bool, now: float) -> None:
        """Note the worker's answer; an answer to an earlier order is ignored."""
        if self.told is not asleep or self.told_s is None:
            return
        took_s, self.told_s, self.asleep = now - self.told_s, None, asleep
        if asleep:
            self.sleeps_s = took_s
        else:
            self.wakes_s = took_s


class EngineRests:
    """Engines are told here to sleep and to wake; there is a record of each worker from its registration on."""

    def __init__(self, scope: JobScope) -> None:
        self._scope = scope
        self._of: dict[str, EngineRest] = {}

    def registered(self, worker: Worker, offer: RegisterWorker) -> None:
        self._of[worker.name] = EngineRest(offer.beside_trainer)

    def gone(self, worker: Worker) -> None:
        self._of.pop(worker.name, None)

    def of(self, worker: Worker) -> EngineRest:
        return self._of[worker.name]

    def tell(self, worker: Worker, now: float, *, asleep: bool) -> bool:
        """Tell a worker to sleep, or to wake; False if the order could not be sent."""
        scope = self._scope
        order = SetAsleep(job=scope.name, term=scope.ledger.term, asleep=asleep)
        told = scope.tell(worker.address, order) is SendOutcome.QUEUED
        if told:
            self.of(worker).tell(asleep, now)
        return told

    def hear(self, worker: Worker, news: WorkerAsleep) -> None:
        self.of(worker).hear(news.asleep, self._scope.ctx.now())
