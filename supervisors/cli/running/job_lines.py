"""What the terminal of ``headrace head`` shows of its jobs: plain lines, each with the job's name before it.

every JobRun ── progress ──▶ head process ── HeadProgress {of_job, …} ──▶ machine process ─▶ JobLines ─▶ lines
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from configs.limits import DEFAULT_LIMITS
from supervisors.api.step_line import step_line
from supervisors.cli.running.outlook import PhaseProgress


class JobLines:
    """Prints the lines of jobs with ``say``. ``update`` takes progress maps; those of a job have the key ``of_job``."""

    def __init__(self, say: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> None:
        self._say, self._now = say, now
        self._steps: dict[str, int] = {}
        self._said_s: dict[str, float] = {}
        self._phases: dict[str, PhaseProgress] = {}

    def update(self, progress: Mapping[str, Any]) -> None:
        """Print what is new in ``progress``."""
        job = str(progress.get("of_job", ""))
        before = f"{job}: " if job else ""
        if "steps" in progress:
            self._steps[job] = int(progress["steps"])
        if "message" in progress:
            self._say(f"{before}{progress['message']}")
        if "phase" in progress:
            phase = self._phases.setdefault(job, PhaseProgress())
            phase.update(progress, self._now())
            if (line := phase.line()) is not None:
                self._say(f"{before}{line}")
        if "reward_mean" in progress and "step" in progress:
            self._step(job, before, progress)
        elif "state" in progress:
            self._say(f"{before}{progress['state']}")

    def _step(self, job: str, before: str, row: Mapping[str, Any]) -> None:
        steps, now_s = self._steps.get(job), self._now()
        if row["step"] != steps and now_s - self._said_s.get(job, float("-inf")) < DEFAULT_LIMITS.step_lines_s:
            return
        self._said_s[job] = now_s
        self._say(f"{before}{step_line(row, steps)}")
