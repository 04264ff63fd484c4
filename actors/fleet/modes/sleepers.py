"""Workers that sleep for as long as a plan has nothing for them.

    release ─SetAsleep(yes)─▶ the engine sleeps once it holds nothing; the worker gets no work and no new versions
    wake ────SetAsleep(no), PullVersion─▶ it wakes, and loads; meanwhile work is sent to it already

Invariants
- A worker that was told to sleep gets no work until it is told to wake. It still generates the samples that it holds.
- The part of a worker that wakes is kept for as long as its last waking took, or ``wake_patience_s``; then the worker
  has ``pull_patience_s`` to load, as all workers have.
"""

from __future__ import annotations

from actors.fleet.modes.rests import EngineRests
from actors.fleet.scope import JobScope
from actors.fleet.versions import Versions
from actors.fleet.workers import Worker
from actors.protocol.workers import WorkerAsleep


class Sleepers:
    """Workers are told here to sleep and to wake; this class also knows which of them could take samples."""

    def __init__(self, scope: JobScope, versions: Versions, rests: EngineRests) -> None:
        self._scope = scope
        self._versions = versions
        self._rests = rests

    @property
    def workers(self) -> list[Worker]:
        """All workers, asleep or awake, except those that have been given notice."""
        return [worker for worker in self._scope.workers.by_name.values() if not worker.leaving]

    def there(self, version: int, now: float) -> set[str]:
        """Names of the workers that could take samples for which ``version`` is needed."""
        return {worker.name for worker in self.workers if self.able(worker, version, now)}

    def able(self, worker: Worker, version: int, now: float) -> bool:
        """Whether a worker serves the version or may be loading it, or can be woken for that."""
        loads = worker.pulling_version >= 0 and now - worker.pulling_since_s < self._scope.limits.pull_patience_s
        return now >= worker.resting_until_s and (worker.policy_version >= version or loads or worker.off_duty)

    def meet(self, now: float) -> list[Worker]:
        """Wake workers that a former life of the scheduler may have told to sleep; returns them."""
        back = [worker for worker in self.workers if worker.again and self._rests.of(worker).told is None]
        return [worker for worker in back if self._rests.tell(worker, now, asleep=False)]

    def wake(self, worker: Worker, now: float) -> bool:
        """Have a worker wake and load the newest version; False if the order could not be sent."""
        told = self._rests.tell(worker, now, asleep=False)
        if told:
            worker.off_duty = False
            self._versions.tell(worker)
            worker.pulling_since_s = now + (self._rests.of(worker).wakes_s or self._scope.limits.wake_patience_s)
        return told

    def release(self, worker: Worker, now: float) -> bool:
        """Have a worker sleep; False if the order could not be sent."""
        told = self._rests.tell(worker, now, asleep=True)
        if told:
            worker.off_duty = True
            worker.pulling_version = -1
        return told

    def heard(self, worker: Worker, news: WorkerAsleep, now: float) -> None:
        """A worker sleeps, or is awake; if awake, its time for loading the version begins now."""
        self._rests.hear(worker, news)
        if not news.asleep:
            worker.pulling_since_s = min(now, worker.pulling_since_s)
