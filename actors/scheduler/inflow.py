"""Tokens from workers into the ledger.

Invariants
- A delta of another life of its worker, or of an older epoch, is counted and never enters.
- What the ledger does not take is stopped at its worker: it would go on generating for nobody.
"""

from __future__ import annotations

from actors.scheduler import events as ev
from actors.scheduler import messages as m
from actors.scheduler.errors import IllegalTransition
from actors.scheduler.job_scope import JobScope
from actors.scheduler.returns import Returns
from actors.scheduler.steps import Steps


class Inflow:
    """Of one life of the scheduler."""

    def __init__(self, scope: JobScope, returns: Returns, steps: Steps) -> None:
        self._scope = scope
        self._returns = returns
        self._steps = steps
        self.stale = 0
        """Deltas of older lives and epochs."""
        self.refused = 0
        """Deltas that could not be read."""

    def take(self, delta: m.TokenDelta) -> None:
        scope, worker = self._scope, self._scope.speaker(delta.worker)
        if worker is None or delta.epoch != scope.ledger.epoch:
            self.stale += 1
            return
        scope.workers.heard(worker, delta.stats, scope.ctx.now())
        event = ev.TokensAppended(
            worker.name, delta.policy_version, delta.assignments, delta.offsets, delta.counts, delta.finished,
            delta.tokens, delta.logprobs,
        )  # fmt: skip
        try:
            outcome = scope.books.apply(event)
        except IllegalTransition as error:
            self.refused += 1
            scope.event("delta_refused", worker=worker.name, why=str(error))
            self._returns.revoke(worker, scope.ledger.in_flight(worker.name), "its delta could not be read")
            return
        worker.latency.add(delta.stats.step_s, delta.offsets, delta.counts, self._steps.prompt_tokens)
        self._returns.after(worker, outcome)
        if len(outcome.broken):
            scope.event("assignments_broken", worker=worker.name, samples=len(outcome.broken))
            self._returns.revoke(worker, outcome.broken, "its tokens did not follow on")
