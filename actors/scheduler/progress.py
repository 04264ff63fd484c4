"""Reports how far a job is, and what it waits for when nothing moves. It changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from actors.fleet.fleet import Fleet
from actors.fleet.scope import JobScope
from actors.ledger.batch import SampleState
from actors.protocol.batches import Progress
from actors.scheduler.grants import Grants
from actors.scheduler.steps import Steps


class ProgressReport:
    """Reports how far a job is. Call ``look`` regularly: it notes since when the ledger has not changed."""

    def __init__(self, scope: JobScope, fleet: Fleet, grants: Grants, steps: Steps) -> None:
        self._scope = scope
        self._steps = steps
        self._grants = grants
        self._fleet = fleet
        self._moved = (-1, 0.0)

    def look(self) -> None:
        if self._moved[0] != self._scope.ledger_writer.events:
            self._moved = (self._scope.ledger_writer.events, self._scope.ctx.now())

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
        return waiting_for(self._view())

    def reason(self, step: int) -> str:
        """What ``step`` alone waits for, in words, however short it has waited."""
        ledger, workers = self._scope.ledger, self._scope.workers.by_name
        states = ledger.batches[step].state
        queued, finished, waiting = (
            int((states == state).sum()) for state in (SampleState.QUEUED, SampleState.FINISHED, SampleState.WAITING)
        )
        held = {name: ledger.located(name, ledger.in_flight(name)).get(step, ()) for name in workers}
        in_flight = {name: len(rows) for name, rows in held.items()}
        view = replace(self._view(), queued=queued, in_flight=in_flight, finished=finished, waiting=waiting)
        return _reason(view)

    def _view(self) -> StallView:
        scope, ledger = self._scope, self._scope.ledger
        states, step, workers = ledger.count_states(), ledger.trainer_step, scope.workers.by_name.values()
        return StallView(
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


@dataclass(frozen=True, slots=True)
class StallView:
    """Describes a job that may be stalled. Counts are of samples, over all steps, unless said otherwise."""

    quiet_s: float
    """Seconds since the ledger last changed."""
    quiet_limit_s: float
    paused: bool
    step: int
    """Step that the trainer commits next."""
    steps: int
    issued: bool
    """Whether the step's batch has been issued."""
    queued: int
    in_flight: dict[str, int]
    """Number of samples by worker."""
    finished: int
    has_rewards: bool
    has_prompts: bool
    has_trainer: bool
    workers: dict[str, int]
    """Policy version that each worker serves."""
    needed_version: int
    newest_version: int
    waiting: int = 0
    """Number of episodes that wait for their environments."""


def waiting_for(view: StallView) -> str:
    """What the job waits for, in words; empty while it makes progress or has nothing left to do."""
    if view.step >= view.steps:
        return ""
    if view.paused:
        return "a resume: the job is paused"
    if view.quiet_s < view.quiet_limit_s:
        return ""
    return f"{_reason(view)}, since {view.quiet_s:.0f} s"


def _reason(view: StallView) -> str:
    if not view.issued:
        return f"the prompts of step {view.step}" + ("" if view.has_prompts else ": no prompt source has registered")
    busy = {name: n for name, n in view.in_flight.items() if n}
    if busy:
        return "tokens from " + ", ".join(f"{name} ({n} samples)" for name, n in sorted(busy.items()))
    if view.queued:
        return _queued_reason(view)
    if view.finished:
        return f"verdicts on {view.finished} samples" + (
            "" if view.has_rewards else ": no reward worker has registered"
        )
    if view.waiting:
        return f"the environments of {view.waiting} episodes"
    if not view.has_trainer:
        return f"the trainer to open step {view.step}"
    return f"the trainer to commit step {view.step}"


def _queued_reason(view: StallView) -> str:
    if not view.workers:
        return f"a rollout worker: {view.queued} samples are queued and none has registered"
    if max(view.workers.values()) >= view.needed_version:
        return f"room at a rollout worker: {view.queued} samples are queued"
    if view.newest_version < view.needed_version:
        return f"version {view.needed_version} of the weights to be published, the newest is {view.newest_version}"
    slow = ", ".join(f"{name} (serves {v})" for name, v in sorted(view.workers.items()))
    return f"version {view.needed_version} to be loaded by {slow}"
