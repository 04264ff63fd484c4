"""Which version of the weights workers are told of.

    trainer publishes ─▶ VersionAvailable: offered ─┐
    samples of step s are on disk: secured ─────────┴─▶ newest = min(offered, secured + 1) ─PullVersion─▶ workers

Invariants
- Workers are never told of a version that was made of samples which a crash could still take: those would otherwise be
  generated anew by their own successor.
- What workers are told never goes back. A weight server that restarted may have lost its newest version (a damaged
  segment): the trainer gives it that again, and workers ask until it is there.
- Whoever has not loaded what it was told to is told again, after ``pull_timeout_s``.
"""

from __future__ import annotations

from collections.abc import Callable

from actors.fleet.scope import JobScope
from actors.fleet.workers import Worker
from actors.ledger.batch import StepBatch
from actors.ledger.whole_steps import newest_whole_step, whole
from actors.protocol.services import ServiceChanged
from actors.protocol.weights import VersionAvailable
from actors.protocol.work import PullVersion
from transport.address import ActorAddress


class Versions:
    """It decides which version workers are told to load."""

    def __init__(self, scope: JobScope) -> None:
        self._scope = scope
        self.newest = -1
        """Version that workers are told of: the newest offered one, if no crash can take the samples it is made of."""
        self.offered = -1
        self.weights: ActorAddress | None = None
        self.secured_step = newest_whole_step(scope.ledger)
        """Newest step whose samples, and all before them, are on disk; they make version s + 1."""
        self._securing_step = -1
        self.oldest_held = -1
        """Oldest version that the weight server holds."""
        self.held_back: Callable[[], int | None] = lambda: None
        """Version beyond which workers are not told of any yet, since it is being evaluated; None: there is none."""

    def offer(self, news: VersionAvailable) -> None:
        if news.policy_version < self.offered and news.weights == self.weights:
            return
        moved = news.weights != self.weights
        self.offered, self.weights, self.oldest_held = news.policy_version, news.weights, news.oldest
        self._announce(moved=moved)

    def secure(self, step: int) -> None:
        """Have the step's samples on disk while the trainer trains on them."""
        if step > max(self.secured_step, self._securing_step):
            self._securing_step = step
            self._scope.ctx.start_task(self._secure(step), f"secure step {step}")

    async def _secure(self, step: int) -> None:
        await self._scope.journaled.journal.durable()
        self.secured(step)

    def secured(self, step: int) -> None:
        """Note that the samples of ``step`` are on disk."""
        self.secured_step = max(self.secured_step, step)
        self._announce()

    def announce(self) -> None:
        """Tell of what was held back."""
        self._announce()

    def _announce(self, *, moved: bool = False) -> None:
        """Tell the workers of the newest version that they may serve, if that is news to them."""
        version = min(self.offered, self.secured_step + 1)
        if (held_back := self.held_back()) is not None:
            version = min(version, held_back)
        version = max(self.newest, version)
        if version == self.newest and not moved:
            return
        self.newest = version
        self._scope.record("version_available", version=version)
        for worker in self._scope.workers.by_name.values():
            self.tell(worker)
        self._scope.assign()  # ahead: each worker has been told to pull what it needs

    def tell_again(self, now: float) -> None:
        """Tell those again that have not loaded for long what they were told to."""
        for worker in self._scope.workers.by_name.values():
            if now - worker.told_at_s > self._scope.limits.pull_timeout_s:
                self.tell(worker)

    def tell(self, worker: Worker) -> None:
        """Tell a worker of the newest version, if it lacks that and does not pull later."""
        if self.weights is not None and worker.policy_version < self.newest and not worker.pulls_later:
            worker.pulls(self.newest, self._scope.ctx.now())
            term = self._scope.ledger.term
            order = PullVersion(job=self._scope.name, term=term, policy_version=self.newest, weights=self.weights)
            self._scope.tell(worker.address, order)

    def may_begin(self, batch: StepBatch) -> bool:
        """Whether training may begin. With a barrier, all of the step must be there, its version everywhere."""
        if self._scope.job.sync.mode != "one_step_barrier" or batch.committed:
            return True
        patience_s, now = self._scope.limits.pull_patience_s, self._scope.ctx.now()
        loaded = (
            worker.policy_version >= batch.step or now - worker.pulling_since_s >= patience_s
            for worker in self._scope.workers.by_name.values()
        )
        return self.newest >= batch.step and whole(batch) and all(loaded)

    def introduce_weights(self) -> None:
        """Tell the trainer where the weight server is, whichever came last: it may be offering to a former one."""
        weights, trainer = self._scope.services.get("weights"), self._scope.services.get("trainer")
        if weights is not None and trainer is not None:
            self._scope.tell(trainer, ServiceChanged(job=self._scope.name, role="weights", address=weights))
