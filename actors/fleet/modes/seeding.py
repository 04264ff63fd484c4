"""The seeding window of a live job (RLBoost 2.3): the trainer's machine generates too for a while, and then trains.

    version v is there ─▶ the window of step v opens ─SetAsleep(no)─▶ local workers load v and get work like all others
    the window ends after its learned length, or once the trainer would not have to wait (scheduling.seeding_end,
                       seeding_estimate.py)
    window over ─Revoke, SetAsleep─▶ local workers hand back samples ─WorkerAsleep─▶ the trainer gets its groups
    step committed ─▶ StepReport ─▶ policies.offload.after_step ─▶ length of the next window, capacity target

    local: on the trainer's machine        remote: all others

Off-policy steps overlap, and that is the only difference: in a window, local workers generate samples of all open
steps, older steps first, so samples of step v + 1 fill the places that the tail of step v leaves. The window still
belongs to step v: it ends once that step is generated, and a step that is generated before its version is there has no
window.

Invariants
- The trainer is given groups only while no window is open and every local engine sleeps. It does not wait for an engine
  that has not fallen asleep within ``seeding_patience_s``; an event then says so.
- A local worker that has been told to sleep gets no work before it has been told to wake.
- No token is generated twice: samples that local workers hold at a window's end go on elsewhere after their last one.
- The trainer does not wait for workers that are not there. While no remote worker serves the step's version, its window
  has no end, and one that is over opens again; meanwhile the trainer trains the groups that it already has.
- With an estimate and relief, a window opens again, too, once the trainer has nothing left to train and its engines
  could help (``policies.hand_over.should_return``): workers were lost, or responses are longer than expected.
- A window ends early when every sample of its step has ended, and while the trainer replays steps.
- The trainer never waits for the window of a later step than its own, since it is then replaying the steps that led to
  that window's version. The version may be lost with the workers that had it, and only the trainer can make it again.
- A new life of the scheduler opens the window anew, unless the step is generated; learned lengths are in the ledger.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from actors.fleet.length_ranking import LengthRanking
from actors.fleet.modes.mode import Mode
from actors.fleet.modes.rests import EngineRests
from actors.fleet.modes.seeding_estimate import SeedingEstimate
from actors.fleet.modes.seeding_step import RemoteFigures, RemoteTimes, SeedingStep, WindowState
from actors.fleet.scope import JobScope
from actors.fleet.versions import Versions
from actors.fleet.workers import Worker
from actors.ledger import events as ev
from actors.ledger.batch import StepBatch
from actors.policies.assigning.view import GroupView, WorkerView
from actors.policies.seeding import offload
from actors.policies.seeding.offload import Offload, OffloadRules, StepReport
from actors.protocol.batches import IssueBatch
from actors.protocol.work import Revoke
from actors.protocol.workers import RegisterWorker, WorkerAsleep, WorkerVersion
from transport.transport import SendOutcome

COLUMNS: Final = ("seed_s", "seeding_target", "seeding_engine_s")
"""Columns of a step's row in metrics.jsonl."""


class Seeding(Mode):
    """Seeding windows are opened and ended here; the mode ``below`` shares the work among workers on duty."""

    def __init__(self, scope: JobScope, versions: Versions, ranking: LengthRanking, below: Mode) -> None:
        super().__init__(scope, versions, ranking)
        self._below = below
        self.pending_max, self.keeps_parts = below.pending_max, below.keeps_parts
        self._rests = EngineRests(scope)
        job, scheduling = scope.job, scope.job.scheduling
        self._estimate = (
            SeedingEstimate(scope.ledger, ranking, scope.limits.seeding_look_s, max_staleness=job.staleness)
            if scheduling.seeding_end == "estimated"
            else None
        )
        self._returns = job.sync.mode != "sync" and scheduling.relief
        """Whether a trainer with nothing left to train switches back to generating."""
        self._first_rules = OffloadRules(
            job.rollout.workers,
            scheduling.seeding_first_s,
            scheduling.seeding_damping,
            scheduling.seeding_floor_s,
            overlapping=job.staleness > 0,
        )
        learned = scope.ledger.window
        first = offload.first(self._first_rules)
        self._learned = first if learned is None else Offload(learned.seed_s, learned.target, learned.memory)
        self._step = SeedingStep(-1, RemoteTimes(scope.ctx.now()))
        self._trainers_step = -1
        """Step that the trainer has open; -1 if none."""
        self._trains_again = False
        """Whether the trainer replays: it lacks groups of a step before the window's, all of which are generated."""
        self._looked_dry_s = -math.inf
        self._generated: dict[int, tuple[SeedingStep, RemoteFigures]] = {}
        """Uncommitted steps after which the next step's window has begun, with what was noted of each."""
        self._workless_since_s: dict[str, float] = {}
        """Local worker → time at which it was last taken off duty."""
        self._given_up: set[str] = set()
        """Local workers that did not fall asleep in time, so that the trainer has begun while they are awake."""

    # ------------------------------------------------------------ the mode below

    def mark(self, step: int, groups: list[GroupView], workers: list[WorkerView]) -> list[GroupView]:
        return self._below.mark(step, groups, workers)

    def handed_out(self, now: float) -> None:
        self._below.handed_out(now)

    def served(self, worker: Worker, news: WorkerVersion) -> None:
        self._below.served(worker, news)

    def may_load(self, worker: Worker) -> bool:
        return self._below.may_load(worker)

    def issued(self, batch: IssueBatch) -> None:
        self._below.issued(batch)

    # ------------------------------------------------------------ local and remote workers

    def registered(self, worker: Worker, offer: RegisterWorker) -> None:
        self._rests.registered(worker, offer)
        self._below.registered(worker, offer)

    def gone(self, worker: Worker) -> None:
        self._rests.gone(worker)
        self._workless_since_s.pop(worker.name, None)
        self._given_up.discard(worker.name)
        self._below.gone(worker)

    def asleep(self, worker: Worker, news: WorkerAsleep) -> None:
        self._rests.hear(worker, news)

    def _is_local(self, worker: Worker) -> bool:
        return self._rests.of(worker).beside_trainer

    @property
    def _local(self) -> list[Worker]:
        return [worker for worker in self._scope.workers.by_name.values() if self._is_local(worker)]

    @property
    def _remote(self) -> list[Worker]:
        """Workers on other machines, without those that were given notice, which get no more work."""
        there = self._scope.workers.by_name.values()
        return [worker for worker in there if not self._is_local(worker) and not worker.leaving]

    @property
    def _rules(self) -> OffloadRules:
        return dataclasses.replace(self._first_rules, local_engines=len(self._local))

    # ------------------------------------------------------------ the window

    def look(self, now: float) -> None:
        self._look(now)
        self._below.look(now)

    def _look(self, now: float, lacking: StepBatch | None = None) -> None:
        """Open the window or end it, and tell local workers that do not know yet.

        ``lacking``: the step that the trainer has open, if it lacks groups of it.
        """
        number = max([self._versions.newest, *(w.policy_version for w in self._scope.workers.by_name.values())])
        if number < 0:
            return
        if number > self._step.number:
            self._generated[self._step.number] = self._step, self._step.remote.figures(now)
            self._step = SeedingStep(number, RemoteTimes(now))
        if lacking is not None:
            self._trains_again = lacking.step < self._step.number and not lacking.generating
        self._step.remote.look(self._remote, now)
        self._open_or_close(now)
        for worker in self._local:
            self._tell(worker, now)

    def _open_or_close(self, now: float) -> None:
        step, before = self._step, self._step.window
        step.window, why = self._next(before, now)
        if before.wakes and not step.window.wakes:
            self._close(why, now)
        elif step.window is WindowState.AWAITS_PROMPTS or (step.window.wakes and not before.wakes):
            step.opened_s = now

    def _next(self, window: WindowState, now: float) -> tuple[WindowState, str]:
        """The state that follows ``window``, and why the window is over if it is."""
        step, ledger = self._step, self._scope.ledger
        if why := self._nothing_to_generate():
            return WindowState.TO_OPEN if why == "replay" or window is WindowState.TO_OPEN else WindowState.OVER, why
        opened = WindowState.OPEN if step.number in ledger.batches else WindowState.AWAITS_PROMPTS
        if window is WindowState.TO_OPEN:
            return opened, ""
        if window is WindowState.OVER:
            return opened if self._window_s() == math.inf or self._ran_dry(now) else window, ""
        if opened is WindowState.OPEN and not ledger.paused and (why := self._is_over(now - step.opened_s, now)):
            return WindowState.OVER, why
        return opened, ""

    def _ran_dry(self, now: float) -> bool:
        """Whether the trainer would wait for the rest of the step so long that its engines should generate."""
        step, local = self._step, [worker for worker in self._local if not worker.leaving]
        asks = self._trainers_step == step.number and step.allowed_s is not None and not self._scope.ledger.paused
        rests = [self._rests.of(worker) for worker in local]
        if self._estimate is None or not self._returns or not asks or not all(rest.asleep for rest in rests):
            return False
        takes_s = [rest.sleeps_s + rest.wakes_s for rest in rests]
        switch_s = max([self._first_rules.floor_s, *takes_s]) / 2
        batch = self._scope.ledger.batches.get(step.number)
        if batch is None or now - self._looked_dry_s < max(switch_s, self._estimate.look_every_s):
            return False
        self._looked_dry_s = now
        dry = self._estimate.ran_dry(batch, self._serving(), len(local), switch_s, now)
        if dry:
            self._scope.event("trainer_ran_dry", step=step.number, remote=len(self._remote))
            step.waits_again(now)
        return dry

    def _nothing_to_generate(self) -> str:
        """Why local workers have nothing to generate now; empty if they have."""
        ledger = self._scope.ledger
        if ledger.trainer_step < ledger.committed_steps or self._trains_again:
            return "replay"
        batch = ledger.batches.get(self._step.number)
        to_come = self._step.number < self._scope.job.steps if batch is None else batch.generating
        return "" if to_come else "generated"

    def _is_over(self, lasted_s: float, now: float) -> str:
        """Why a window that has ``lasted_s`` is over; empty if it is not."""
        learned_s = self._window_s()
        if self._estimate is not None and self._rules.floor_s <= lasted_s and learned_s < math.inf:
            batch = self._scope.ledger.batches[self._step.number]
            enough = self._estimate.would_not_wait(batch, self._serving(), now)
            if enough is not None:
                return "estimate" if enough else ""
        return "time" if lasted_s >= learned_s else ""

    def _window_s(self) -> float:
        """Length of the window with the present remote workers; infinite if none of them serves the step."""
        serves = bool(self._serving())
        return offload.window_s(self._rules, self._learned, len(self._remote)) if serves else math.inf

    def _serving(self) -> list[Worker]:
        """Remote workers that could go on with samples that are handed over."""
        return [worker for worker in self._remote if worker.policy_version >= self._step.number]

    def _close(self, why: str, now: float) -> None:
        step, learned_s, seconds = self._step, self._window_s(), now - self._step.opened_s
        step.lasted_s += seconds
        if why == "time":
            step.given_s = learned_s
        elif self._estimate is not None and learned_s < math.inf:
            step.given_s = step.lasted_s  # the estimate has ended it, however long the learned length is
        handed_over = sum(worker.in_flight for worker in self._local)
        self._scope.event(
            "seeding_window", step=step.number, seconds=round(seconds, 3), why=why, handed_over=handed_over,
            remote=len(self._remote),
        )  # fmt: skip

    def _tell(self, worker: Worker, now: float) -> None:
        """Tell a local worker to sleep or to wake. It gets no work until it has been told to wake."""
        asleep, scope = not self._step.window.wakes, self._scope
        if self._rests.of(worker).told == asleep:
            worker.off_duty = asleep
            return
        if not worker.off_duty:
            worker.off_duty, self._workless_since_s[worker.name] = True, now
            self._given_up.discard(worker.name)
        if asleep and worker.in_flight:
            held = scope.ledger.in_flight(worker.name)
            revoke = Revoke(job=scope.name, term=scope.ledger.term, assignments=held)
            if scope.tell(worker.address, revoke) is not SendOutcome.QUEUED:
                return
        if self._rests.tell(worker, now, asleep=asleep):
            worker.off_duty = asleep

    # ------------------------------------------------------------ the trainer

    def trainer_opened(self, step: int) -> None:
        self._below.trainer_opened(step)
        self._trainers_step, self._trains_again = step, False
        if self._estimate is not None:
            self._estimate.opened()

    def trainer_given(self, batch: StepBatch, rows: np.ndarray) -> None:
        self._below.trainer_given(batch, rows)
        if self._estimate is not None:
            self._estimate.given(int(batch.length[rows].sum()), self._scope.ctx.now())

    def holds(self, batch: StepBatch) -> bool:
        """Whether the trainer must wait for groups of ``batch``, since its own machine generates."""
        step, now = self._step, self._scope.ctx.now()
        self._look(now, batch)
        ours = batch.step == step.number
        if ours and step.asked_s is None:
            step.asked_s = now
        held = self._must_wait(batch, now)
        if ours and not held and step.allowed_s is None:
            step.allowed_s = now
        return held

    def _must_wait(self, batch: StepBatch, now: float) -> bool:
        if self._step.window.wakes or (batch.step > self._step.number and batch.generating):
            return True
        awake = [worker for worker in self._local if not self._rests.of(worker).asleep]
        patience_s = self._scope.limits.seeding_patience_s
        if any(now - self._workless_since_s.get(worker.name, 0.0) < patience_s for worker in awake):
            return True
        for worker in awake:
            if worker.name not in self._given_up:
                self._given_up.add(worker.name)
                self._scope.event("engine_stays_awake", worker=worker.name, step=batch.step, after_s=patience_s)
        return False

    # ------------------------------------------------------------ what was learned

    def committed(self, batch: StepBatch, trainer: Mapping[str, float]) -> dict[str, float]:
        return self._below.committed(batch, trainer) | self._learn(batch, trainer)

    def _learn(self, batch: StepBatch, trainer: Mapping[str, float]) -> dict[str, float]:
        """Learn how long the next window should be; returns columns for the step's row."""
        number, now = batch.step, self._scope.ctx.now()
        noted = self._generated.pop(number, None)
        if noted is None and self._step.number == number:
            noted = self._step, self._step.remote.figures(now)
        self._generated = {step: of for step, of in self._generated.items() if step > number}
        if noted is None:  # a former life of the scheduler has seen it
            return self._columns(0.0, 0.0)
        step, remote = noted
        seconds = trainer.get("seconds", 0.0)
        waited_s = trainer.get("trainer_idle_fraction", 0.0) * seconds
        report = StepReport(
            remote_mean=remote.mean,
            remote_next=len(self._remote),
            train_idle_s=max(0.0, waited_s - step.held_s),
            remote_idle_s=remote.idle_s,
            train_s=max(0.0, seconds - waited_s),
            remote_s=remote.busy_s,
            seed_s=step.given_s if step.given_s < math.inf else None,
            lasted_s=min(step.given_s, step.lasted_s),
        )
        if self._estimate is not None:
            self._estimate.committed(batch, report.train_s)
        engine_s = offload.engine_s(self._rules, self._learned, report)
        self._learned = learned = offload.after_step(self._rules, self._learned, report)
        self._scope.ledger_writer.apply(ev.WindowLearned(number, learned.seed_s, learned.target, dict(learned.memory)))
        return self._columns(step.lasted_s, engine_s)

    def _columns(self, seed_s: float, engine_s: float) -> dict[str, float]:
        return dict(zip(COLUMNS, (seed_s, self._learned.target, engine_s), strict=True))
