"""How far the job is, and whom it waits for when nothing moves. It only looks on."""

from __future__ import annotations

from actors.fleet.fleet import Fleet
from actors.fleet.scope import JobScope
from actors.protocol.batches import Progress
from actors.scheduler.grants import Grants
from actors.scheduler.stall import StallView, waiting_for
from actors.scheduler.steps import Steps


class ProgressReport:
    """It says how far a job is. ``look`` now and then, so that it is known since when the ledger has not changed."""

    def __init__(self, scope: JobScope, fleet: Fleet, grants: Grants, steps: Steps) -> None:
        self._scope = scope
        self._steps = steps
        self._grants = grants
        self._fleet = fleet
        self._moved = (-1, 0.0)

    def look(self) -> None:
        if self._moved[0] != self._scope.journaled.events:
            self._moved = (self._scope.journaled.events, self._scope.ctx.now())

    def make(self) -> Progress:
        self.look()
        ledger, workers = self._scope.ledger, self._scope.workers.by_name.values()
        counters = ledger.counters
        return Progress(
            job=self._scope.name,
            committed_steps=ledger.committed_steps,
            policy_version=self._fleet.versions.newest,
            states=ledger.count_states(),
            workers={w.name: w.in_flight for w in workers},
            prompts_lost=counters.prompts_lost,
            samples_trained_twice=counters.samples_trained_twice,
            samples_migrated=counters.samples_migrated,
            waiting_for=self._waiting_for(),
            paused=ledger.paused,
            stopping=ledger.stopping,
            quiet_s=self._scope.ctx.now() - self._moved[1],
        )

    def _waiting_for(self) -> str:
        scope, ledger = self._scope, self._scope.ledger
        states, step, workers = ledger.count_states(), ledger.trainer_step, scope.workers.by_name.values()
        return waiting_for(
            StallView(
                quiet_s=scope.ctx.now() - self._moved[1],
                quiet_limit_s=scope.limits.stall_report_s,
                paused=ledger.paused,
                step=step,
                steps=self._steps.count,
                issued=step in ledger.batches,
                queued=states["queued"],
                in_flight={w.name: w.in_flight for w in workers},
                finished=states["finished"],
                has_rewards="rewards" in scope.services,
                has_prompts="prompts" in scope.services,
                has_trainer=self._grants.trainer is not None,
                workers={w.name: w.policy_version for w in workers},
                needed_version=max(step - scope.job.staleness, 0),
                newest_version=self._fleet.versions.newest,
                waiting=states["waiting"],
            )
        )
