"""Planned generation in a live job: who generates the step, who sleeps, and what becomes of it (RLHFless).

    the step before is committed, the version is announced ─▶ step_planner: StepPlan ─▶ parts ─▶ policies.assign
    planned, and asleep ──────────SetAsleep(no), PullVersion─▶ its part goes ahead to it, while it wakes and loads
    nearly done ─▶ cuts ─┐
    nothing left for it ─┴─SetAsleep─▶ it sleeps, and pulls nothing          left out ─SetAsleep─▶ sleeps all the step
    every sample has ended ─▶ everybody sleeps until the next plan; whom that will want is woken shortly before

    to the job, for whoever starts functions: StepPlanned, WorkerReleased, WorkerWoken, GenerationEnded

Invariants
- A plan is a preference. Samples whose worker is gone, or cannot take them, are anybody's, and sleepers are woken for
  what nobody awake has room for: nothing waits as long as somebody is there.
- A step is planned once in a life of the scheduler, and no sample of it is handed out before. All that is known of a
  plan can be lost: a new life plans what is still queued, and what runs stays where it is.
- The first plan of a life waits ``plan_patience_s`` at most for as many workers as the job file begins with; of a later
  life, ``reattach_s`` at most for as many functions as there may be.
- While the job is paused nothing is planned, and whoever generates nothing sleeps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from actors.core.message import Message
from actors.fleet.cuts import Cuts
from actors.fleet.length_ranking import LengthRanking
from actors.fleet.scope import JobScope
from actors.fleet.sleepers import Sleepers
from actors.fleet.step_parts import Queued, StepParts
from actors.fleet.step_planner import Planning, StepPlanner
from actors.fleet.versions import Versions
from actors.fleet.workers import Worker
from actors.host.clock import time_of_day_s
from actors.ledger.batch import StepBatch
from actors.policies import prewarm
from actors.policies.prewarm import Prewarm, PrewarmView
from actors.policies.view import GroupView
from actors.protocol.batches import IssueBatch
from actors.protocol.job_news import GenerationEnded, StepPlanned, WorkerReleased, WorkerWoken
from actors.protocol.metrics import Span
from actors.protocol.workers import WorkerAsleep

COLUMNS: Final = (
    "plan_workers",
    "plan_forecast_s",
    "plan_generation_s",
    "plan_forecast_cost",
    "plan_ms",
    "plan_cut_samples",
    "plan_violation_s",
    "plan_wake_s",
)
"""Columns of a step's row."""
_TRACK: Final = "plan"
_GAPS: Final = 8
"""Number of past steps from which the time of the next plan is foreseen: training times drift."""


@dataclass(slots=True)
class PlannedStep:
    """It is the step that is generated, or was generated last."""

    number: int
    planning: Planning
    parts: StepParts
    planned_s: float
    took_s: float
    known: set[str]
    """Workers that have been seen since it was planned."""
    ended_s: float = math.nan
    cut_samples: int = 0
    wake_s: float = 0.0
    """Longest time that a worker took from being told to wake until it served."""
    waking: dict[str, float] = field(default_factory=dict[str, float])
    """Worker → time at which it was told to wake, until it serves."""

    @property
    def ended(self) -> bool:
        return not math.isnan(self.ended_s)


class Planned:
    """It plans the steps of a job. ``look`` before work is handed out, ``after`` it, as often as you like."""

    def __init__(self, scope: JobScope, versions: Versions, ranking: LengthRanking) -> None:
        self._scope = scope
        self._versions = versions
        self._sleepers = Sleepers(scope, versions)
        self._planner = StepPlanner(scope, ranking)
        self._cuts = Cuts(scope, ranking)
        self._step: PlannedStep | None = None
        self._learned = scope.ledger.committed_steps
        """Steps whose lengths are known: the next one may be planned."""
        self._waits_since_s: float | None = None
        """Since when the first plan could be made."""
        self._gaps_s: list[float] = []
        """Seconds from the end of generation to the next plan, of past steps."""
        self._prewarm: Prewarm | None = None

    # ------------------------------------------------------------ before work is handed out

    def look(self, now: float) -> None:
        """Plan the step that may be generated, and wake those whom it wants."""
        if self._step is None and "job" not in self._scope.services:
            return  # it is about to register, and is to hear of the first plan, too
        for worker in self._sleepers.meet(now):
            self._tell_job(WorkerWoken(job=self._scope.name, worker=worker.name, step=self._learned))
        batch = self._batch()
        if batch is not None and self._may_plan(batch, now):
            self._plan(batch, now)
        step = self._current(batch)
        if batch is None or step is None:
            self._warm(now)
            return
        self._meet(step, now)
        step.parts.wait_no_longer(now)
        for worker in self._to_wake(step, batch, now):
            self._wake(worker, step.number, now)

    def pause(self, now: float) -> None:
        """Let everybody sleep who generates nothing; whoever has a part is woken as the job goes on."""
        for worker in self._sleepers.workers:
            if not worker.off_duty and not worker.in_flight:
                self._release(worker, self._learned, now)

    def mark(self, number: int, groups: list[GroupView]) -> list[GroupView]:
        """The queued groups of a step with whom they are kept for; none before it is planned."""
        step = self._step
        if step is None or step.number != number:
            return []
        return step.parts.mark(groups, self._sleepers.there(number, self._scope.ctx.now()))

    def _batch(self) -> StepBatch | None:
        """The step after the committed ones, once their lengths are known."""
        ledger = self._scope.ledger
        return ledger.batches.get(self._learned) if self._learned == ledger.committed_steps else None

    def _current(self, batch: StepBatch | None) -> PlannedStep | None:
        """The step, while it is generated by its plan."""
        step = self._step
        return step if step is not None and batch is not None and step.number == batch.step and not step.ended else None

    def _may_plan(self, batch: StepBatch, now: float) -> bool:
        """Whether the step is not planned, and somebody may generate it."""
        if (self._step is not None and self._step.number >= batch.step) or not batch.generating:
            return False
        if max([self._versions.newest, *(w.policy_version for w in self._sleepers.workers)]) < batch.step:
            return False
        there, job, more = len(self._sleepers.workers), self._scope.job, self._planner.starts_functions
        if not there and not more:
            return False
        least, patience_s = 0 if more else job.scheduling.workers_min, self._scope.limits.plan_patience_s
        if more and self._scope.ledger.term > 1:  # functions that are there already would be planned as new ones
            least, patience_s = job.scheduling.workers_max or 0, self._scope.limits.reattach_s
        if self._step is not None or there >= max(job.rollout.workers, least):
            return True
        self._waits_since_s = now if self._waits_since_s is None else self._waits_since_s
        return now - self._waits_since_s >= patience_s

    def _plan(self, batch: StepBatch, now: float) -> None:
        scope, workers = self._scope, self._sleepers.workers
        planning = self._planner.plan(batch, workers, now)
        took_s = scope.ctx.now() - now
        if self._step is not None and self._step.ended:
            self._gaps_s = [*self._gaps_s, now - self._step.ended_s][-_GAPS:]
        limits = scope.limits
        waits_until_s = {
            name: now + (2 * ready_in_s + limits.pull_patience_s if ready_in_s else limits.wake_patience_s)
            for name, ready_in_s in planning.new.items()
        }
        parts = StepParts(batch, planning.prompts, planning.plan, waits_until_s)
        known = {worker.name for worker in workers}
        self._step, self._prewarm = PlannedStep(batch.step, planning, parts, now, took_s, known), None
        plan = planning.plan
        named = [name for name in plan.parts if name in known]
        at_work = [worker.name for worker in workers if worker.in_flight and worker.name not in plan.parts]
        table = " ".join(f"{one.workers}:{one.seconds:.3f}/{one.cost:.3f}" for one in plan.forecasts)
        scope.event(
            "step_planned", step=batch.step, workers=",".join(named), longest=plan.longest or "",
            more=len(planning.new), why=plan.why, seconds_and_cost=table, took_s=round(took_s, 4),
        )  # fmt: skip
        self._tell_job(StepPlanned(job=scope.name, step=batch.step, workers=named + at_work, more=len(planning.new)))

    def _meet(self, step: PlannedStep, now: float) -> None:
        """Let workers that have registered since the plan take part."""
        for worker in self._sleepers.workers:
            if worker.name not in step.known:
                step.known.add(worker.name)
                if step.parts.join(worker.name):
                    self._planner.cold_s = now - step.planned_s

    # ------------------------------------------------------------ who is awake

    def _queued(self, step: PlannedStep, batch: StepBatch, now: float) -> Queued:
        return step.parts.queued(batch, self._sleepers.there(step.number, now))

    def _to_wake(self, step: PlannedStep, batch: StepBatch, now: float) -> list[Worker]:
        """Sleepers for whom something is kept, and as many more as it takes for what is anybody's."""
        queued, workers = self._queued(step, batch, now), self._sleepers.workers
        found = [worker for worker in workers if worker.off_duty and worker.name in queued.own]
        lacking = queued.anybodys
        for worker in workers:
            if (not worker.off_duty or worker in found) and self._sleepers.able(worker, step.number, now):
                lacking -= max(0, worker.slots - worker.in_flight)
        for worker in workers:
            if lacking > 0 and worker.off_duty and worker not in found:
                found.append(worker)
                lacking -= worker.slots
        return found

    def _wake(self, worker: Worker, number: int, now: float) -> None:
        if self._sleepers.wake(worker, now):
            if self._step is not None and self._step.number == number:
                self._step.waking[worker.name] = now
            self._tell_job(WorkerWoken(job=self._scope.name, worker=worker.name, step=number))

    def _release(self, worker: Worker, number: int, now: float) -> None:
        if self._sleepers.release(worker, now):
            self._scope.record("worker_released", worker=worker.name, step=number)
            self._tell_job(WorkerReleased(job=self._scope.name, worker=worker.name, step=number))

    def heard(self, worker: Worker, news: WorkerAsleep) -> None:
        """A worker sleeps, or is awake, as it was told."""
        self._sleepers.heard(worker, news, self._scope.ctx.now())
        self.serves(worker)

    def serves(self, worker: Worker) -> None:
        """A worker is awake, or has loaded a version: perhaps that was all that it was waited for."""
        step, rest = self._step, worker.engine_rest
        awake = rest.told is False and rest.told_s is None
        if step is not None and awake and worker.policy_version >= step.number and worker.name in step.waking:
            took_s = self._scope.ctx.now() - step.waking.pop(worker.name)
            step.wake_s = max(step.wake_s, took_s)
            self._scope.record("worker_woken", worker=worker.name, step=step.number, took_s=round(took_s, 4))

    # ------------------------------------------------------------ after work was handed out

    def after(self, now: float) -> None:
        """Cut parts that are nearly done, and let those sleep that have nothing left."""
        batch = self._batch()
        step = self._current(batch)
        if batch is None or step is None:
            return
        if not batch.generating:
            self._end(step, now)
            return
        sources = self._cuts.look(batch, step.parts, step.parts.longest, now)
        step.cut_samples += sum(sources.values())
        queued, coming = self._queued(step, batch, now), self._cuts.coming()
        for worker in self._sleepers.workers:
            name = worker.name
            wanted = worker.in_flight or name in queued.own or name in coming or queued.anybodys
            joined = name in step.parts.joined and (queued.own or queued.anybodys)
            idle = not wanted and not joined and self._sleepers.able(worker, step.number, now)
            if not worker.off_duty and (idle or name in sources):
                self._release(worker, step.number, now)

    def _end(self, step: PlannedStep, now: float) -> None:
        """Every sample of the step has ended."""
        step.ended_s = now
        for worker in self._sleepers.workers:
            if not worker.off_duty:
                self._release(worker, step.number, now)
        self._tell_job(GenerationEnded(job=self._scope.name, step=step.number))
        self._show(step)
        tick_s = self._scope.limits.scheduler_tick_s  # what wakes faster than that need not be woken ahead
        wakes_s = [wakes_s for worker in self._sleepers.workers if (wakes_s := worker.engine_rest.wakes_s) > tick_s]
        view = PrewarmView(now, self._gaps_s, wakes_s, 2 * tick_s, wanted=len(step.planning.plan.parts), ready=0)
        self._prewarm = prewarm.decide(view, now)

    def _warm(self, now: float) -> None:
        """Wake those whom the next plan will probably want, so that they are awake by then."""
        step, order = self._step, self._prewarm
        if step is None or order is None or now < order.at_s or step.number + 1 not in self._scope.ledger.batches:
            return
        self._prewarm = None
        there = {one.name: one for one in self._sleepers.workers if one.off_duty and not one.beside_trainer}
        for worker in [there[name] for name in step.planning.plan.parts if name in there][: order.workers]:
            self._wake(worker, step.number + 1, now)

    # ------------------------------------------------------------ what is told of it

    def issued(self, batch: IssueBatch) -> None:
        """Note what the data set says of the prompts of a step."""
        self._planner.issued(batch)

    def committed(self, batch: StepBatch) -> dict[str, float]:
        """Learn from a committed step; returns its columns of metrics.jsonl."""
        self._planner.committed(batch)
        self._learned = batch.step + 1
        step = self._step
        if step is None or step.number != batch.step:  # a former life of the scheduler has planned it
            return dict.fromkeys(COLUMNS, math.nan)
        chosen = step.planning.plan.chosen
        values = (
            len(step.planning.plan.parts), chosen.seconds, step.ended_s - step.planned_s, chosen.cost,
            1000 * step.took_s, step.cut_samples, chosen.violation_s, step.wake_s,
        )  # fmt: skip
        return dict(zip(COLUMNS, values, strict=True))

    def _tell_job(self, news: Message) -> None:
        if (job := self._scope.services.get("job")) is not None:
            self._scope.tell(job, news)

    def _show(self, step: PlannedStep) -> None:
        """A bar on the plan's track of the trace, with what was forecast of it."""
        end_s = time_of_day_s()
        begin_s, forecast_s = end_s - (step.ended_s - step.planned_s), step.planning.plan.chosen.seconds
        args: dict[str, float | int | str] = {"step": step.number, "workers": len(step.planning.plan.parts)}
        args |= {"cut_samples": step.cut_samples} | ({"forecast_s": forecast_s} if math.isfinite(forecast_s) else {})
        self._scope.spans(_TRACK, [Span(name="generate", start_s=begin_s, end_s=end_s, args=args)])
