"""Decides which version of the weights workers are told to load.

    trainer publishes ─▶ VersionAvailable: offered ─┐
    samples of step s are on disk: secured ─────────┴─▶ newest = min(offered, secured + 1) ─PullVersion─▶ workers

Invariants
- Workers are never told of a version while a crash could still lose the samples that it was trained on: those samples
  would then be generated again by a version that was trained on them.
- The version that workers are told never goes back. A weight server that restarted may have lost its newest version (a
  damaged segment): the trainer then offers it again, and workers ask until it is there.
- A worker that has not loaded the version after ``pull_timeout_s`` is told again.
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
    """The versions that workers are told to load are decided here."""

    def __init__(
        self, scope: JobScope, held_back: Callable[[], int | None], may_load: Callable[[Worker], bool]
    ) -> None:
        """``held_back``: gives the newest version that workers may be told of while it is being evaluated, or None.
        ``may_load``: whether a worker is told of versions now.
        """
        self._scope, self._held_back, self._may_load = scope, held_back, may_load
        self.newest = -1
        """Version that workers are told of: the newest offered one whose samples no crash can lose."""
        self.offered = -1
        self.weights: ActorAddress | None = None
        self.secured_step = newest_whole_step(scope.ledger)
        """Newest step s with all samples up to it on disk, so that version s + 1 is safe."""
        self._securing_step = -1
        self.oldest_held = -1
        """Oldest version that the weight server holds."""

    def offer(self, news: VersionAvailable) -> None:
        if news.policy_version < self.offered and news.weights == self.weights:
            return
        moved = news.weights != self.weights
        self.offered, self.weights, self.oldest_held = news.policy_version, news.weights, news.oldest
        self.announce(moved=moved)

    def secure(self, step: int) -> None:
        """Wait in the background until the step's samples are on disk, while the trainer trains on them."""
        if step > max(self.secured_step, self._securing_step):
            self._securing_step = step
            self._scope.ctx.start_task(self._secure(step), f"secure step {step}")

    async def _secure(self, step: int) -> None:
        await self._scope.ledger_writer.journal.durable()
        self.secured(step)

    def secured(self, step: int) -> None:
        """Note that the samples of ``step`` are on disk."""
        self.secured_step = max(self.secured_step, step)
        self.announce()

    def newest_possible(self) -> int:
        """The newest version that a worker can have, whichever life of the scheduler has told it."""
        return self.secured_step + 1

    def announce(self, *, moved: bool = False) -> None:
        """Tell the workers of the newest version that they may serve, if that is news to them."""
        version = min(self.offered, self.secured_step + 1)
        if (held_back := self._held_back()) is not None:
            version = min(version, held_back)
        version = max(self.newest, version)
        if version == self.newest and not moved:
            return
        self.newest = version
        self._scope.record("version_available", version=version)
        for worker in self._scope.workers.by_name.values():
            self.tell(worker)
        self._scope.assign()  # work may be sent ahead: each worker has been told to pull

    def tell_again(self, now: float) -> None:
        """Tell workers again that have not loaded the version for long."""
        for worker in self._scope.workers.by_name.values():
            if now - worker.told_at_s > self._scope.limits.pull_timeout_s:
                self.tell(worker)

    def tell(self, worker: Worker) -> None:
        """Tell a worker to load the newest version, if it does not have that and may load it now."""
        if self.weights is not None and worker.policy_version < self.newest and self._may_load(worker):
            worker.pulls(self.newest, self._scope.ctx.now())
            term = self._scope.ledger.term
            order = PullVersion(job=self._scope.name, term=term, policy_version=self.newest, weights=self.weights)
            self._scope.tell(worker.address, order)

    def may_begin(self, batch: StepBatch) -> bool:
        """Whether training may begin: with a barrier, once the whole step and its version at every worker are there."""
        if self._scope.job.sync.mode != "one_step_barrier" or batch.committed:
            return True
        patience_s, now = self._scope.limits.pull_patience_s, self._scope.ctx.now()
        loaded = (
            worker.policy_version >= batch.step or now - worker.pulling_since_s >= patience_s
            for worker in self._scope.workers.by_name.values()
        )
        return self.newest >= batch.step and whole(batch) and all(loaded)

    def introduce_weights(self) -> None:
        """Tell the trainer where the weight server is when either registers: it may still know a former one."""
        weights, trainer = self._scope.services.get("weights"), self._scope.services.get("trainer")
        if weights is not None and trainer is not None:
            self._scope.tell(trainer, ServiceChanged(job=self._scope.name, role="weights", address=weights))
