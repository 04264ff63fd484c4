"""The seeding window of a live job (RLBoost 2.3): the trainer's machine generates too, for a while, and then it trains.

    version v is there ─▶ the window of step v opens ─SetAsleep(no)─▶ local workers load v and get work like all others
    window over: as long as was learned, or the trainer would not wait (scheduling.seeding_end, seeding_estimate.py)
    window over ─Revoke, SetAsleep─▶ local workers hand back what they hold ─WorkerAsleep─▶ the trainer gets its groups
    step committed ─▶ StepReport ─▶ policies.offload.after_step ─▶ length of the next window, capacity target

    local: on the trainer's machine        remote: all others

Off-policy steps overlap, and nothing else is different: in a window local workers generate whatever steps are open,
older ones first, so samples of step v + 1 fill the places that the tail of step v leaves. The window is step v's all
the same: it is over once that is generated, and none opens for a step that was generated before its version was there.

Invariants
- The trainer is given groups only while the window is over and every local engine sleeps. One that does not fall asleep
  within ``seeding_patience_s`` is waited for no longer, and the record says so.
- A local worker that has been told to sleep gets no work before it has been told to wake.
- Nothing is generated twice: what local workers hold at the window's end goes on elsewhere behind its last token.
- Nobody waits for workers that are not there. While no remote worker serves the step's version, its window has no end;
  one that is over opens again. What the trainer has been given by then it trains meanwhile.
- With an estimate and relief a window opens again, too, once the trainer has run dry and its engines are of use
  meanwhile (``policies.hand_over.should_return``): others were lost, or lengths wrongly expected.
- A window is over early when every sample of its step has ended, and while the trainer replays steps.
- The trainer never waits for the window of a step behind its own. It trains again what the version of that window was
  made of, committed or not; the version may have gone with its holders, and then nobody but the trainer can make it.
- A new life of the scheduler opens the window anew, unless the step is generated; what was learned is in the ledger.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from actors.fleet.remote_times import RemoteFigures, RemoteTimes
from actors.fleet.scope import JobScope
from actors.fleet.seeding_estimate import SeedingEstimate
from actors.fleet.seeding_step import SeedingStep
from actors.fleet.versions import Versions
from actors.fleet.workers import Worker
from actors.ledger import events as ev
from actors.ledger.batch import StepBatch
from actors.policies import offload
from actors.policies.offload import Offload, OffloadRules, StepReport
from actors.protocol.work import Revoke, SetAsleep
from actors.protocol.workers import WorkerAsleep
from transport.transport import SendOutcome

COLUMNS: Final = ("seed_s", "seeding_target", "seeding_engine_s")
"""Columns of a step's row."""


class Seeding:
    """It opens and ends the seeding windows of a job. ``look`` before work is handed out, as often as you like."""

    def __init__(self, scope: JobScope, versions: Versions, estimate: SeedingEstimate | None = None) -> None:
        """``estimate``: with ``scheduling.seeding_end: estimated``."""
        self._scope = scope
        self._versions = versions
        self._estimate = estimate
        streams = scope.job.sync.mode != "sync"
        self._returns = streams and scope.job.scheduling.relief
        """Whether a trainer with nothing to train switches back: its engines would be of use meanwhile."""
        scheduling = scope.job.scheduling
        self._first_rules = OffloadRules(
            scope.job.rollout.workers,
            scheduling.seeding_first_s,
            scheduling.seeding_damping,
            scheduling.seeding_floor_s,
            overlapping=scope.job.staleness > 0,
        )
        learned = scope.ledger.window
        first = offload.first(self._first_rules)
        self._known = first if learned is None else Offload(learned.seed_s, learned.target, learned.memory)
        self._step = SeedingStep(-1, RemoteTimes(scope.ctx.now()))
        self._trainers_step = -1
        """Step that the trainer has open; -1: none."""
        self._trains_again = False
        """Whether it lacks groups of a step that the window's version was made of, and all of those are generated."""
        self._looked_dry_s = -math.inf
        self._generated: dict[int, tuple[SeedingStep, RemoteFigures]] = {}
        """Steps that are not committed yet, and whose successor's window has begun."""

    # ------------------------------------------------------------ who is where

    @property
    def _local(self) -> list[Worker]:
        return [worker for worker in self._scope.workers.by_name.values() if worker.beside_trainer]

    @property
    def _remote(self) -> list[Worker]:
        """Workers elsewhere. Those with notice get no work any more, so nobody waits for them either."""
        there = self._scope.workers.by_name.values()
        return [worker for worker in there if not worker.beside_trainer and not worker.leaving]

    @property
    def _rules(self) -> OffloadRules:
        return dataclasses.replace(self._first_rules, local_engines=len(self._local))

    # ------------------------------------------------------------ the window

    def look(self, now: float, lacking: StepBatch | None = None) -> None:
        """Open the window or end it, and tell local workers that have not been told.

        ``lacking``: the trainer has this step open and lacks groups of it.
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
        step, serving = self._step, self._window_s()
        if why := self._nothing_to_generate():
            step.fresh = step.fresh or why == "replay"
            estimated = self._estimate is not None and step.opened_s is not None and serving < math.inf
            self._close(why, now)
            if estimated:
                step.given_s = step.lasted_s  # by the estimate, however long the learned one is
        elif step.opened_s is None:
            if step.fresh or serving == math.inf or self._ran_dry(now):
                step.fresh, step.opened_s = False, now
        elif step.number not in self._scope.ledger.batches:
            step.opened_s = now  # the window is one of generation, and its prompts are not here yet
        elif not self._scope.ledger.paused and (why := self._is_over(now - step.opened_s, serving, now)):
            self._close(why, now)
            step.given_s = serving if why == "time" else step.lasted_s

    def _ran_dry(self, now: float) -> bool:
        """Whether the trainer would wait so long for the rest of the step that its engines had better generate."""
        step, local = self._step, [worker for worker in self._local if not worker.leaving]
        asks = self._trainers_step == step.number and step.allowed_s is not None and not self._scope.ledger.paused
        if self._estimate is None or not self._returns or not asks or not all(w.engine_rest.asleep for w in local):
            return False
        takes_s = [worker.engine_rest.sleeps_s + worker.engine_rest.wakes_s for worker in local]
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
        """Why local workers are of no use now; empty if they are."""
        ledger = self._scope.ledger
        if ledger.trainer_step < ledger.committed_steps or self._trains_again:
            return "replay"
        batch = ledger.batches.get(self._step.number)
        to_come = self._step.number < self._scope.job.steps if batch is None else batch.generating
        return "" if to_come else "generated"

    def _is_over(self, lasted_s: float, learned_s: float, now: float) -> str:
        """Why a window that has ``lasted_s`` is over; empty if it is not. ``learned_s``: as ``_window_s``."""
        if self._estimate is not None and self._rules.floor_s <= lasted_s and learned_s < math.inf:
            batch = self._scope.ledger.batches[self._step.number]
            enough = self._estimate.would_not_wait(batch, self._serving(), now)
            if enough is not None:
                return "estimate" if enough else ""
        return "time" if lasted_s >= learned_s else ""

    def _window_s(self) -> float:
        """How long the window may be with the remote workers of now; without one that serves the step it has no end."""
        serves = bool(self._serving())
        return offload.window_s(self._rules, self._known, len(self._remote)) if serves else math.inf

    def _serving(self) -> list[Worker]:
        """Remote workers that could go on with what is handed over."""
        return [worker for worker in self._remote if worker.policy_version >= self._step.number]

    def _close(self, why: str, now: float) -> None:
        step = self._step
        if step.opened_s is None:
            return
        seconds, step.opened_s = now - step.opened_s, None
        step.lasted_s += seconds
        handed_over = sum(worker.in_flight for worker in self._local)
        self._scope.event(
            "seeding_window", step=step.number, seconds=round(seconds, 3), why=why, handed_over=handed_over,
            remote=len(self._remote),
        )  # fmt: skip

    def _tell(self, worker: Worker, now: float) -> None:
        """Tell a local worker to sleep or to wake. It gets no work until it has been told to wake."""
        asleep, rest = self._step.opened_s is None, worker.engine_rest
        if rest.told == asleep:
            worker.off_duty = asleep
            return
        scope, term = self._scope, self._scope.ledger.term
        if not worker.off_duty:
            worker.off_duty, rest.since_s, rest.given_up = True, now, False
        if asleep and worker.in_flight:
            revoke = Revoke(job=scope.name, term=term, assignments=scope.ledger.in_flight(worker.name))
            if scope.tell(worker.address, revoke) is not SendOutcome.QUEUED:
                return
        order = SetAsleep(job=scope.name, term=term, asleep=asleep)
        if scope.tell(worker.address, order) is SendOutcome.QUEUED:
            rest.tell(asleep, now)
            worker.off_duty = asleep

    # ------------------------------------------------------------ the trainer

    def trainer_opened(self, step: int) -> None:
        """Note the step that the trainer has open; -1: none."""
        self._trainers_step, self._trains_again = step, False
        if self._estimate is not None:
            self._estimate.opened()

    def trainer_given(self, batch: StepBatch, rows: np.ndarray) -> None:
        """Note what the trainer has been given to train."""
        if self._estimate is not None:
            self._estimate.given(int(batch.length[rows].sum()), self._scope.ctx.now())

    def heard(self, worker: Worker, news: WorkerAsleep) -> None:
        """A local worker is as it was told to be."""
        worker.engine_rest.hear(news.asleep, self._scope.ctx.now())

    def holds(self, batch: StepBatch) -> bool:
        """Whether the trainer must wait for the groups of ``batch``."""
        step, now = self._step, self._scope.ctx.now()
        self.look(now, batch)
        ours = batch.step == step.number
        if ours and step.asked_s is None:
            step.asked_s = now
        held = self._must_wait(batch, now)
        if ours and not held and step.allowed_s is None:
            step.allowed_s = now
        return held

    def _must_wait(self, batch: StepBatch, now: float) -> bool:
        if self._step.opened_s is not None or (batch.step > self._step.number and batch.generating):
            return True
        awake = [worker for worker in self._local if not worker.engine_rest.asleep]
        patience_s = self._scope.limits.seeding_patience_s
        if any(now - worker.engine_rest.since_s < patience_s for worker in awake):
            return True
        for worker in awake:
            if not worker.engine_rest.given_up:
                worker.engine_rest.given_up = True
                self._scope.event("engine_stays_awake", worker=worker.name, step=batch.step, after_s=patience_s)
        return False

    # ------------------------------------------------------------ what was learned

    def committed(self, number: int, trainer: Mapping[str, float]) -> dict[str, float]:
        """Columns of metrics.jsonl for a step that has been committed; ``trainer``: its figures of it."""
        now = self._scope.ctx.now()
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
        if self._estimate is not None and (batch := self._scope.ledger.batches.get(number)) is not None:
            self._estimate.committed(batch, report.train_s)
        engine_s = offload.engine_s(self._rules, self._known, report)
        self._known = known = offload.after_step(self._rules, self._known, report)
        self._scope.journaled.apply(ev.WindowLearned(number, known.seed_s, known.target, dict(known.memory)))
        return self._columns(step.lasted_s, engine_s)

    def _columns(self, seed_s: float, engine_s: float) -> dict[str, float]:
        return dict(zip(COLUMNS, (seed_s, self._known.target, engine_s), strict=True))
