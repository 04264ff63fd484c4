"""A fault plan in the course of a run: each fault strikes when its time has come, whatever the others do.

    FaultPlan ─▶ FaultSchedule ─▶ one task a fault: trigger ─▶ strike ─▶ every_s ─▶ strike …
                                     ▲ processes ready, or after_step steps committed

A plan for several jobs has a schedule in each: a fault belongs to the job that its target names, and goes by that job's
time and steps. A fault on what all jobs share, the head or a node, goes by the first job's time unless it names one.
Strikes left when the run ends are recorded as skipped; those that were not possible, as failed, and people are told. A
head that was killed, perhaps by this plan, loses its schedule: the next head reads in events.jsonl how far it had come.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from actors.core.context import named_rng
from actors.host.clock import time_of_day_s
from configs.errors import ConfigError, Problem
from configs.fault_plan import FaultBase, FaultPlan
from configs.run_files import EVENTS
from configs.schema import JobConfig
from supervisors.nemesis.fault_targets import HEAD
from supervisors.tree.errors import FaultNotPossible

_NAMES: Final = re.compile(r"(rollout-\d+|trainer)(\.rank\d+)?|weights|rewards|head")
STARTED: Final = "faults_started"
"""The event with which a plan begins: strikes before it belong to another plan."""


def check_plan(plan: FaultPlan, jobs: Sequence[JobConfig], where: str) -> None:
    """Check what can be known of a plan before the jobs begin.

    Raises:
        ConfigError: it names a process or job that there will not be, or could mean several.
    """
    problems: list[Problem] = []
    by_name = {job.name: job for job in jobs}
    for number, fault in enumerate(plan.faults):
        field, target = f"faults.{number}.target", fault.target
        if target.name is not None and not _NAMES.fullmatch(target.name):
            wrong = f"no process of this run is called {target.name!r}"
            problems.append(Problem(where, f"{field}.name", wrong, "Use rollout-0, trainer, weights, rewards or head"))
        job = by_name.get(_job_of(fault, list(by_name)))
        if target.job is not None and job is None:
            wrong = f"this run is of {'jobs' if len(jobs) > 1 else 'job'} {_listed(by_name)}, not {target.job!r}"
            fix = "Name one of them" if len(jobs) > 1 else "Leave it out"
            problems.append(Problem(where, f"{field}.job", wrong, fix))
        elif job is None:
            wrong = f"is missing, and {target} may be of any of the jobs {_listed(by_name)}"
            problems.append(Problem(where, f"{field}.job", wrong, "Say which one is meant"))
        elif fault.after_step is not None and target.job is None and len(jobs) > 1:
            wrong = f"is missing, and after_step may count the steps of any of the jobs {_listed(by_name)}"
            problems.append(Problem(where, f"{field}.job", wrong, "Say whose steps are counted"))
        elif fault.after_step is not None and fault.after_step > job.steps:
            wrong = f"{fault.after_step} is more than the job's {job.steps} steps"
            problems.append(Problem(where, f"faults.{number}.after_step", wrong, "Lower it"))
    if problems:
        raise ConfigError(problems)


def _listed(jobs: Mapping[str, JobConfig]) -> str:
    return ", ".join(map(repr, jobs))


def _job_of(fault: FaultBase, jobs: Sequence[str]) -> str:
    """The job to which a fault belongs; empty: it may be any of several."""
    target = fault.target
    if target.job is not None or len(jobs) == 1:
        return target.job or jobs[0]
    is_shared = HEAD in (target.role, target.name) or target.role == "node" or target.node is not None
    return jobs[0] if is_shared else ""


@dataclass(frozen=True)
class JobFaults:
    """A plan, and which of its faults belong to one job."""

    plan: FaultPlan
    numbers: frozenset[int]


def faults_of(plan: FaultPlan, job: str, jobs: Sequence[str]) -> JobFaults:
    """The part of ``plan`` that belongs to ``job``, one of ``jobs``."""
    numbers = (number for number, fault in enumerate(plan.faults) if _job_of(fault, jobs) == job)
    return JobFaults(plan, frozenset(numbers))


class Striker(Protocol):
    """Injects the faults of a schedule, and records what became of each: a nemesis."""

    async def strike(self, fault: FaultBase, rng: random.Random, number: int = 0) -> list[str]: ...
    def record(self, name: str, **fields: float | str) -> None: ...


class Watched(Protocol):
    """What a schedule follows: a run."""

    @property
    def run_dir(self) -> Path: ...
    def summary(self) -> dict[str, Any]: ...
    def subscribe(self, listener: Callable[[Mapping[str, Any]], None]) -> Callable[[], None]: ...
    def say(self, message: str) -> None: ...


class FaultSchedule:
    """Carries out a job's part of a fault plan. ``start`` it when the run's processes are ready, ``stop`` it
    before they stop.

    Args:
        continued: a head before this one has begun with the plan.
    """

    def __init__(self, nemesis: Striker, run: Watched, faults: JobFaults, *, continued: bool = False) -> None:
        self._nemesis = nemesis
        self._run = run
        self._plan = plan = faults.plan
        self._numbers = sorted(faults.numbers)
        self._past = Past.of(run.run_dir / EVENTS) if continued else Past()
        self._steps = int(run.summary().get("steps", 0))
        self._moved = asyncio.Event()
        self._unsubscribe: Callable[[], None] = lambda: None
        self._tasks: list[asyncio.Task[None]] = []
        self._left = {n: max(0, plan.faults[n].times - self._past.struck[n]) for n in self._numbers}
        self.injected = self._past.injected
        self.failed = self._past.failed

    def start(self) -> None:
        """Start to wait for each fault's time."""
        self._unsubscribe = self._run.subscribe(self._on_progress)
        if self._past.started_s is None:
            self._nemesis.record(STARTED, faults=len(self._numbers), seed=self._plan.seed)
        for number in self._numbers:
            fault = self._plan.faults[number]
            name = f"fault {number}: {fault.kind}"
            self._tasks.append(asyncio.create_task(self._follow(number, fault), name=name))

    def stop(self) -> dict[str, int]:
        """End the schedule; returns how many strikes were injected, failed, or skipped as the run was over first."""
        self._unsubscribe()
        for task in self._tasks:
            task.cancel()
        skipped = [(number, left) for number, left in self._left.items() if left]
        for number, left in skipped:
            fault = self._plan.faults[number]
            self._nemesis.record("fault_skipped", fault=number, kind=fault.kind, target=str(fault.target), strikes=left)
        return {"injected": self.injected, "failed": self.failed, "skipped": sum(left for _, left in skipped)}

    def _on_progress(self, progress: Mapping[str, Any]) -> None:
        if "reward_mean" in progress:  # a row of metrics.jsonl: that many steps are committed
            self._steps = max(self._steps, int(progress["step"]))
            self._moved.set()

    async def _follow(self, number: int, fault: FaultBase) -> None:
        rng = named_rng(self._plan.seed, "fault", str(number), str(self._past.struck[number]))
        first = True
        while self._left[number]:
            await (self._trigger(number, fault) if first else asyncio.sleep(fault.every_s or 0.0))
            first = False
            await self._strike(number, fault, rng)

    async def _trigger(self, number: int, fault: FaultBase) -> None:
        """Wait until the first strike that is left is due."""
        if self._past.struck[number]:
            await asyncio.sleep(fault.every_s or 0.0)
            return
        while fault.after_step is not None and self._steps < fault.after_step:
            self._moved.clear()
            await self._moved.wait()  # the run's end cancels this task
        elapsed_s = 0.0
        if fault.after_step is None and self._past.started_s is not None:
            elapsed_s = time_of_day_s() - self._past.started_s
        await asyncio.sleep(max(0.0, fault.delay_after_trigger_s - elapsed_s))

    async def _strike(self, number: int, fault: FaultBase, rng: random.Random) -> None:
        """Strike once. If the run ends while the strike still waits for its target, it counts as skipped."""
        try:
            hit = await self._nemesis.strike(fault, rng, number)
        except FaultNotPossible as error:
            self.failed += 1
            self._run.say(f"fault {number} ({fault.kind} on {fault.target}) was not injected: {error}")
        else:
            self.injected += 1
            self._run.say(f"fault {number}: {fault.kind} on {', '.join(hit)}")
        self._left[number] -= 1


class Past:
    """The past of a plan: how far it had come when its head ended."""

    def __init__(self) -> None:
        self.started_s: float | None = None
        """Wall-clock time at which the plan began; None: it has not begun."""
        self.struck: Counter[int] = Counter()
        """Number of strikes by the fault's number, with those on a head that ended before it could record them."""
        self.injected = self.failed = 0

    @classmethod
    def of(cls, events: Path) -> Past:
        """Read it from ``events``: the part since a plan last began."""
        past, announced, ended = cls(), Counter[int](), Counter[int]()
        for line in events.read_text("utf-8").splitlines() if events.exists() else ():
            try:
                row: dict[str, Any] = json.loads(line)
                kind, number = row["event"], int(row.get("fault", -1))
            except (ValueError, KeyError, TypeError):
                continue  # torn by the head's end
            if kind == STARTED:
                past, announced, ended = cls(), Counter[int](), Counter[int]()
                past.started_s = float(row["time_s"])
            elif kind == "fault_announced":
                announced[number] += 1
            elif kind in ("fault_injected", "fault_failed"):
                ended[number] += 1
                past.failed += kind == "fault_failed"
        past.struck = announced | ended  # the greater of the two counts, for each fault
        past.injected = past.struck.total() - past.failed
        return past
