"""Workers that sleep for as long as a plan has nothing for them.

    release ─SetAsleep(yes)─▶ its engine sleeps once it holds nothing; it gets no work and is told of no version
    wake ────SetAsleep(no), PullVersion─▶ it wakes, and loads; work goes ahead to it meanwhile

Invariants
- A worker that was told to sleep gets no work before it was told to wake. What it still holds it generates.
- One that wakes keeps its part for as long as waking took it last, or ``wake_patience_s``; then it has
  ``pull_patience_s`` to load, as all have.
"""

from __future__ import annotations

from actors.fleet.scope import JobScope
from actors.fleet.versions import Versions
from actors.fleet.workers import Worker
from actors.protocol.work import SetAsleep
from actors.protocol.workers import WorkerAsleep
from transport.transport import SendOutcome


class Sleepers:
    """It has workers sleep and wake, and knows which of them could take something."""

    def __init__(self, scope: JobScope, versions: Versions) -> None:
        self._scope = scope
        self._versions = versions

    @property
    def workers(self) -> list[Worker]:
        """All workers, asleep or awake, but those that have been given notice."""
        return [worker for worker in self._scope.workers.by_name.values() if not worker.leaving]

    def there(self, version: int, now: float) -> set[str]:
        """Names of the workers that could take something."""
        return {worker.name for worker in self.workers if self.able(worker, version, now)}

    def able(self, worker: Worker, version: int, now: float) -> bool:
        """Whether a worker serves the version or may be loading it, or can be woken for that."""
        loads = worker.pulling_version >= 0 and now - worker.pulling_since_s < self._scope.limits.pull_patience_s
        return now >= worker.resting_until_s and (worker.policy_version >= version or loads or worker.off_duty)

    def meet(self, now: float) -> list[Worker]:
        """Wake whom a former life of the scheduler may have had sleep; returns them."""
        back = [worker for worker in self.workers if worker.again and worker.engine_rest.told is None]
        return [worker for worker in back if self._tell(worker, now, asleep=False)]

    def wake(self, worker: Worker, now: float) -> bool:
        """Have a worker wake and load the newest version; False if it could not be told."""
        told = self._tell(worker, now, asleep=False)
        if told:
            worker.off_duty = worker.pulls_later = False
            self._versions.tell(worker)
            worker.pulling_since_s = now + (worker.engine_rest.wakes_s or self._scope.limits.wake_patience_s)
        return told

    def release(self, worker: Worker, now: float) -> bool:
        """Have a worker sleep; False if it could not be told."""
        told = self._tell(worker, now, asleep=True)
        if told:
            worker.off_duty = worker.pulls_later = True
            worker.pulling_version = -1
        return told

    def heard(self, worker: Worker, news: WorkerAsleep, now: float) -> None:
        """A worker sleeps, or is awake: from now on it loads what it was told to."""
        worker.engine_rest.hear(news.asleep, now)
        if not news.asleep:
            worker.pulling_since_s = min(now, worker.pulling_since_s)

    def _tell(self, worker: Worker, now: float, *, asleep: bool) -> bool:
        scope = self._scope
        order = SetAsleep(job=scope.name, term=scope.ledger.term, asleep=asleep)
        if scope.tell(worker.address, order) is not SendOutcome.QUEUED:
            return False
        worker.engine_rest.tell(asleep, now)
        return True
