"""A fault plan in the course of a run: each fault strikes when its time has come, whatever the others do.

    FaultPlan ─▶ FaultSchedule ─▶ one task a fault: trigger ─▶ strike ─▶ every_s ─▶ strike …
                                     ▲ processes ready, or after_step steps committed

What was not struck when the run ends is recorded as skipped; what could not be done, as failed, and told.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from actors.core.context import named_rng
from configs.errors import ConfigError, Problem
from configs.fault_plan import FaultBase, FaultPlan
from configs.schema import JobConfig
from supervisors.errors import FaultNotPossible
from supervisors.job_run import JobRun
from supervisors.nemesis import Nemesis

_NAMES: Final = re.compile(r"rollout-\d+|trainer|weights|rewards|head")


def check_plan(plan: FaultPlan, job: JobConfig, where: str) -> None:
    """What can be known of a plan before the run begins.

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


class FaultSchedule:
    """Of one run and one plan. ``start`` it when the run's processes are ready, ``stop`` it before they are stopped."""

    def __init__(self, nemesis: Nemesis, run: JobRun, plan: FaultPlan, say: Callable[[str], None]) -> None:
        self._nemesis = nemesis
        self._run = run
        self._plan = plan
        self._say = say
        self._steps = int(run.summary().get("steps", 0))
        self._moved = asyncio.Event()
        self._unsubscribe: Callable[[], None] = lambda: None
        self._tasks: list[asyncio.Task[None]] = []
        self._left = [fault.times for fault in plan.faults]
        self.injected = 0
        self.failed = 0

    def start(self) -> None:
        """Let time run."""
        self._unsubscribe = self._run.subscribe(self._on_progress)
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
        rng = named_rng(self._plan.seed, "fault", str(number))
        while fault.after_step is not None and self._steps < fault.after_step:
            self._moved.clear()
            await self._moved.wait()  # the run's end cancels this task
        await asyncio.sleep(fault.delay_after_trigger_s)
        for strike in range(fault.times):
            if strike:
                await asyncio.sleep(fault.every_s or 0.0)
            await self._strike(number, fault, rng)

    async def _strike(self, number: int, fault: FaultBase, rng: Any) -> None:
        self._left[number] -= 1
        try:
            hit = await self._nemesis.strike(fault, rng, number)
        except FaultNotPossible as error:
            self.failed += 1
            self._say(f"fault {number} ({fault.kind} on {fault.target}) was not injected: {error}")
        else:
            self.injected += 1
            self._say(f"fault {number}: {fault.kind} on {', '.join(hit)}")
