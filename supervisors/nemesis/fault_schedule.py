"""A fault plan in the course of a run: each fault strikes when its time has come, whatever the others do.

    FaultPlan ─▶ FaultSchedule ─▶ one task a fault: trigger ─▶ strike ─▶ every_s ─▶ strike …
                                     ▲ processes ready, or after_step steps committed

What was not struck when the run ends is recorded as skipped; what could not be done, as failed, and told. A head that
was killed, by this plan perhaps, loses its schedule: the next head's reads in events.jsonl how far it had come.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from actors.core.context import named_rng
from actors.host.clock import time_of_day_s
from configs.errors import ConfigError, Problem
from configs.fault_plan import FaultBase, FaultPlan
from configs.schema import JobConfig
from supervisors.tree.errors import FaultNotPossible

_NAMES: Final = re.compile(r"(rollout-\d+|trainer)(\.rank\d+)?|weights|rewards|head")
STARTED: Final = "faults_started"
"""The event with which a plan begins: what was struck before belongs to another one."""


def check_plan(plan: FaultPlan, job: JobConfig, where: str) -> None:
    """Check what can be known of a plan before the run begins.

    Raises:
        ConfigError: it names a process or job that this run will not have.
    """
    problems: list[Problem] = []
    for number, fault in enumerate(plan.faults):
        field, target = f"faults.{number}.target", fault.target
        if target.name is not None and not _NAMES.fullmatch(target.name):
            wrong = f"no process of this run is called {target.name!r}"
            problems.append(Problem(where, f"{field}.name", wrong, "Use rollout-0, trainer, weights, rewards or head"))
        if target.job not in (None, job.name):
            wrong = f"this run is of job {job.name!r}, not {target.job!r}"
            problems.append(Problem(where, f"{field}.job", wrong, "Leave it out"))
        if fault.after_step is not None and fault.after_step > job.steps:
            wrong = f"{fault.after_step} is more than the job's {job.steps} steps"
            problems.append(Problem(where, f"faults.{number}.after_step", wrong, "Lower it"))
    if problems:
        raise ConfigError(problems)


class Striker(Protocol):
    """A schedule has this strike, and record what became of it: a nemesis."""

    async def strike(self, fault: FaultBase, rng: random.Random, number: int = 0) -> list[str]: ...
    def record(self, name: str, **fields: float | str) -> None: ...


class Watched(Protocol):
    """A schedule follows this: a run."""

    @property
    def run_dir(self) -> Path: ...
    def summary(self) -> dict[str, Any]: ...
    def subscribe(self, listener: Callable[[Mapping[str, Any]], None]) -> Callable[[], None]: ...
    def say(self, message: str) -> None: ...


class FaultSchedule:
    """A plan in the course of a run. ``start`` it when the run's processes are ready, ``stop`` it before they stop.

    Args:
        continued: a head before this one has begun with the plan.
    """

    def __init__(self, nemesis: Striker, run: Watched, plan: FaultPlan, *, continued: bool = False) -> None:
        self._nemesis = nemesis
        self._run = run
        self._plan = plan
        self._past = Past.of(run.run_dir / "events.jsonl") if continued else Past()
        self._steps = int(run.summary().get("steps", 0))
        self._moved = asyncio.Event()
        self._unsubscribe: Callable[[], None] = lambda: None
        self._tasks: list[asyncio.Task[None]] = []
        self._left = [max(0, fault.times - self._past.struck[n]) for n, fault in enumerate(plan.faults)]
        self.injected = self._past.injected
        self.failed = self._past.failed

    def start(self) -> None:
        """Let time run."""
        self._unsubscribe = self._run.subscribe(self._on_progress)
        if self._past.started_s is None:
            self._nemesis.record(STARTED, faults=len(self._plan.faults), seed=self._plan.seed)
        for number, fault in enumerate(self._plan.faults):
            name = f"fault {number}: {fault.kind}"
            self._tasks.append(asyncio.create_task(self._follow(number, fault), name=name))

    def stop(self) -> dict[str, int]:
        """End it; returns how many strikes were injected, failed, and skipped because the run was over first."""
        self._unsubscribe()
        for task in self._tasks:
            task.cancel()
        skipped = [(number, left) for number, left in enumerate(self._left) if left]
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
        """Until the first strike that is left."""
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
        """One strike. If the run is over while it still waits for its target, it is left, and counts as skipped."""
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
        """When the plan began, on the wall clock."""
        self.struck: Counter[int] = Counter()
        """The strikes by the fault's number, with those on a head that did not live to tell of them."""
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
