"""Planned generation in a live job: which workers generate a step, and which ones sleep (RLHFless).

    the step before is committed, the version is announced ─▶ step_planner: StepPlan ─▶ parts ─▶ policies.assign
    a worker has a part, and sleeps ─SetAsleep(no), PullVersion─▶ its part is sent to it while it wakes and loads
    it is nearly done ─▶ cuts ─┐
    nothing is left for it ────┴─SetAsleep─▶ it sleeps, and pulls nothing
    it is left out of the plan ─SetAsleep─▶ it sleeps for the whole step
    every sample has ended ─▶ all sleep until the next plan; those that it will probably use are woken shortly before

    to the job, for providers that start functions: StepPlanned, WorkerReleased, WorkerWoken, GenerationEnded

Invariants
- A plan is a preference. Samples whose worker is gone, or cannot take them, may go to any worker; sleepers are woken
  for samples that no awake worker has room for. So nothing waits as long as some worker is there.
- A step is planned once in a life of the scheduler, and none of its samples is handed out before. All knowledge of a
  plan may be lost: a new life plans the samples that are still queued, and running ones stay where they are.
- The first plan of a scheduler's life waits at most ``plan_patience_s`` for ``rollout.workers`` workers, or
  ``workers_min`` if that is more. Where the provider starts functions, the first plan of a later life waits at most
  ``reattach_s`` for ``workers_max``, since functions that exist may still have to register.
- While the job is paused nothing is planned, and workers that generate nothing sleep.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final

from actors.core.message import Message
from actors.fleet.length_ranking import LengthRanking
from actors.fleet.modes.cuts import Cuts
from actors.fleet.modes.mode import Mode
from actors.fleet.modes.rests import EngineRests
from actors.fleet.modes.sleepers import Sleepers
from actors.fleet.modes.step_parts import Queued, StepParts
from actors.fleet.modes.step_planner import Planning, StepPlanner
from actors.fleet.scope import JobScope
from actors.fleet.versions import Versions
from actors.fleet.workers import Worker
from actors.host.clock import time_of_day_s
from actors.ledger.batch import StepBatch
from actors.policies.assigning.view import GroupView, WorkerView
from actors.policies.planning import prewarm
from actors.policies.planning.prewarm import Prewarm, PrewarmView
from actors.protocol.batches import IssueBatch
from actors.protocol.job_news import GenerationEnded, StepPlanned, WorkerReleased, WorkerWoken
from actors.protocol.metrics import TraceSpan
from actors.protocol.workers import RegisterWorker, WorkerAsleep, WorkerVersion

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
"""Columns of a step's row in metrics.jsonl."""
_TRACK: Final = "plan"
_GAPS: Final = 8
"""Number of past steps from which the time of the next plan is predicted; few, since training times drift."""


@dataclass(slots=True)
class PlannedStep:
    """A planned step is the one that is generated now, or was generated last."""

    number: int
    planning: Planning
    parts: StepParts
    planned_s: float
    took_s: float
    known: set[str]
    """Workers that took part in the plan, or have registered since."""
    ended_s: float = math.nan
    cut_samples: int = 0
    wake_s: float = 0.0
    """Longest time that a worker took from being told to wake until it served."""
    waking: dict[str, float] = field(default_factory=dict[str, float])
    """Worker → time at which it was told to wake, until it serves."""

    @property
    def ended(self) -> bool:
        return not math.isnan(self.ended_s)


class Planned(Mode):
    """Each step of a job is planned: some workers get a part of it, and all others sleep."""

    newest_epoch_only: ClassVar[bool] = True
    keeps_parts = True

    def __init__(self, scope: JobScope, versions: Versions, ranking: LengthRanking) -> None:
        super().__init__(scope, versions, ranking)
        self._rests = EngineRests(scope)
        self._sleepers = Sleepers(scope, versions, self._rests)
        self._planner = StepPlanner(scope, ranking, self._rests)
        self._cuts = Cuts(scope, ranking, self._planner.transfer_s)
        self._step: PlannedStep | None = None
        self._learned = scope.ledger.committed_steps
        """Number of steps whose lengths are known, so that the next step may be planned."""
        self._waits_since_s: float | None = None
        """Time since which the first plan could have been made; None: not possible yet, or made without waiting."""
        self._gaps_s: list[float] = []
        """Seconds from the end of generation to the next plan, of past steps."""
        self._prewarm: Prewarm | None = None

    # ------------------------------------------------------------ workers

    def registered(self, worker: Worker, offer: RegisterWorker) -> None:
        self._rests.registered(worker, offer)

    def gone(self, worker: Worker) -> None:
        self._rests.gone(worker)
        self._planner.transfer_s.pop(worker.name, None)

    def served(self, worker: Worker, news: WorkerVersion) -> None:
        self._planner.transfer_s[worker.name] = news.pull_s + news.load_s
        self._note_awake(worker)

    def asleep(self, worker: Worker, news: WorkerAsleep) -> None:
        self._sleepers.heard(worker, news, self._scope.ctx.now())
        self._note_awake(worker)

    def may_load(self, worker: Worker) -> bool:
        """Whether the worker is awake or waking: a sleeper is told of the newest version when it is woken."""
        return not worker.off_duty

    def _note_awake(self, worker: Worker) -> None:
        """A worker is awake, or has loaded a version: note how long waking took if it serves the step now."""
        step, rest = self._step, self._rests.of(worker)
        awake = rest.told is False and rest.told_s is None
        if step is not None and awake and worker.policy_version >= step.number and worker.name in step.waking:
            took_s = self._scope.ctx.now() - step.waking.pop(worker.name)
            step.wake_s = max(step.wake_s, took_s)
            self._scope.record("worker_woken", worker=worker.name, step=step.number, took_s=round(took_s, 4))

    # ------------------------------------------------------------ before work is handed out

    def look(self, now: float) -> None:
        """Plan the step that may be generated, and wake the workers that it needs."""
        if self._scope.ledger.paused:
            self._pause(now)
            return
        if self._step is None and "job" not in self._scope.services:
            return  # the job is about to register, and must hear of the first plan, too
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

    def _pause(self, now: float) -> None:
        """Let workers sleep that generate nothing; those with a part are woken when the job goes on."""
        for worker in self._sleepers.workers:
            if not worker.off_duty and not worker.in_flight:
                self._release(worker, self._learned, now)

    def mark(self, step: int, groups: list[GroupView], workers: list[WorkerView]) -> list[GroupView]:
        """The queued groups of a step, marked with the workers they are kept for; none before it is planned."""
        planned = self._step
        if planned is None or planned.number != step:
            return []
        return planned.parts.mark(groups, self._sleepers.there(step, self._scope.ctx.now()))

    def _batch(self) -> StepBatch | None:
        """The batch after the committed ones, once their lengths are known; else None."""
        ledger = self._scope.ledger
        return ledger.batches.get(self._learned) if self._learned == ledger.committed_steps else None

    def _current(self, batch: StepBatch | None) -> PlannedStep | None:
        """The planned step of ``batch``, while it is being generated; else None."""
        step = self._step
        return step if step is not None and batch is not None and step.number == batch.step and not step.ended else None

    def _may_plan(self, batch: StepBatch, now: float) -> bool:
        """Whether the step is not planned yet, and workers may generate it now."""
        if (self._step is not None and self._step.number >= batch.step) or not batch.generating:
            return False
        if max([self._versions.newest, *(w.policy_version for w in self._sleepers.workers)]) < batch.step:
            return False
        there, job, starts_more = len(self._sleepers.workers), self._scope.job, self._planner.starts_functions
        if not there and not starts_more:
            return False
        least, patience_s = 0 if starts_more else job.scheduling.workers_min, self._scope.limits.plan_patience_s
        if starts_more and self._scope.ledger.term > 1:  # else existing functions would be planned as new ones
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
        """Sleepers that samples are kept for, and as many more as the samples kept for no worker need."""
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

    # ------------------------------------------------------------ after work was handed out

    def handed_out(self, now: float) -> None:
        """Cut parts that are nearly done, and let workers sleep that have nothing left."""
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
        tick_s = self._scope.limits.scheduler_tick_s  # workers that wake faster need not be woken early
        wakes_s = [wakes_s for worker in self._sleepers.workers if (wakes_s := self._rests.of(worker).wakes_s) > tick_s]
        view = PrewarmView(now, self._gaps_s, wakes_s, 2 * tick_s, wanted=len(step.planning.plan.parts), ready=0)
        self._prewarm = prewarm.decide(view, now)

    def _warm(self, now: float) -> None:
        """Wake the workers that the next plan will probably use, so that they are awake by then."""
        step, order = self._step, self._prewarm
        if step is None or order is None or now < order.at_s or step.number + 1 not in self._scope.ledger.batches:
            return
        self._prewarm = None
        there = {
            one.name: one for one in self._sleepers.workers if one.off_duty and not self._rests.of(one).beside_trainer
        }
        for worker in [there[name] for name in step.planning.plan.parts if name in there][: order.workers]:
            self._wake(worker, step.number + 1, now)

    # ------------------------------------------------------------ what is told of it

    def issued(self, batch: IssueBatch) -> None:
        self._planner.issued(batch)

    def committed(self, batch: StepBatch, trainer: Mapping[str, float]) -> dict[str, float]:
        self._planner.committed(batch)
        self._learned = batch.step + 1
        columns = self._columns(batch)
        self._scope.assign()  # the next step may be planned now
        return columns

    def _columns(self, batch: StepBatch) -> dict[str, float]:
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
        """Draw the step's generation on the plan's track of the trace, with its forecast."""
        end_s = time_of_day_s()
        begin_s, forecast_s = end_s - (step.ended_s - step.planned_s), step.planning.plan.chosen.seconds
        args: dict[str, float | int | str] = {"step": step.number, "workers": len(step.planning.plan.parts)}
        args |= {"cut_samples": step.cut_samples} | ({"forecast_s": forecast_s} if math.isfinite(forecast_s) else {})
        self._scope.spans(_TRACK, [TraceSpan(name="generate", start_s=begin_s, end_s=end_s, args=args)])
