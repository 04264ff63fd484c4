"""For benchmarks that do harm: a run on real processes, whom to hit, and when the run's own record says what followed.

One clock: the time of day of this machine. It is noted right before a signal is sent, each line of events.jsonl has it,
and so has the file that a new head writes when it is ready.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from actors.control.errors import ControlError
from benchmarks._jobs import BenchmarkFailed, model_of
from configs.loader import load_job
from supervisors.testing.run_under_test import HeadraceRun

PATIENCE_S: Final = 60.0
"""How long a measured run may take to do what is waited for."""

Row = dict[str, Any]


def spread_reward(prompt: str, response: str, answer: str, **_: object) -> float:
    """For random tokens: siblings differ, so that there is something to learn from."""
    return len(response) % 7 / 6


def with_vocabulary(job_file: Path) -> list[str]:
    """The settings with which simulated engines say tokens that the job's model knows."""
    options = dict(load_job(job_file).rollout.engine_options)
    options["vocab"] = int(json.loads((model_of(job_file) / "config.json").read_text())["vocab_size"])
    return [f"rollout.engine_options={json.dumps(options)}"]


@dataclass(frozen=True, slots=True)
class Harm:
    """A signal that was sent."""

    name: str
    at_s: float
    """Time of day."""


class HarmedRun(HeadraceRun):
    """A run that is measured while it is harmed; what does not come in time fails the benchmark."""

    def harm(self, name: str, number: signal.Signals) -> Harm:
        """Signal the process of that name."""
        pid = self.settle(f"process {name}", lambda: self._pid_of(name), timeout_s=PATIENCE_S)
        at_s = time.time()
        os.kill(pid, number)
        return Harm(name, at_s)

    def harm_if_there(self, name: str, number: signal.Signals) -> Harm | None:
        """As ``harm``, without waiting; None while that process is away, or when the run is over."""
        pid, at_s = self._pid_of(name), time.time()
        if pid is None:
            return None
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return None
        return Harm(name, at_s)

    def began_s(self, name: str) -> float:
        """Time of day at which the process of that name was made."""
        return psutil.Process(
            self.settle(f"process {name}", lambda: self._pid_of(name), timeout_s=PATIENCE_S)
        ).create_time()

    def _pid_of(self, name: str) -> int | None:
        """None while it, or the head, is being started again."""
        try:
            return self.processes().get(name)
        except (ControlError, OSError):
            return None

    def after(self, harm: Harm, event: str, *, timeout_s: float = PATIENCE_S, **fields: Any) -> Row:
        """The first event of that name and with those fields since ``harm``; waits for it."""

        def look() -> Row | None:
            return self.look_after(harm.at_s, event, **fields)

        return self.wait_until(f"{event} {fields} after the harm to {harm.name}", look, timeout_s=timeout_s)

    def look_after(self, at_s: float, event: str, **fields: Any) -> Row | None:
        """As ``after``, without waiting."""
        rows = (row for row in self.events(event) if row["time_s"] >= at_s)
        return next((row for row in rows if all(row.get(key) == value for key, value in fields.items())), None)

    def serving(self) -> set[str]:
        """Workers that are registered and serve a version, by what has been recorded."""
        serve: set[str] = set()
        for row in self.events():
            if row["event"] == "worker_version":
                serve.add(row["worker"])
            elif row["event"] in ("worker_down", "worker_leaving"):
                serve.discard(row["worker"])
            elif row["event"] == "scheduler_opened":
                serve.clear()
        return serve

    def wait_serving(self, workers: int) -> set[str]:
        """Until at least that many workers serve."""

        def enough() -> set[str] | None:
            serve = self.serving()
            return serve if len(serve) >= workers else None

        return self.wait_until(f"{workers} workers that serve", enough, timeout_s=PATIENCE_S)

    def end(self) -> Row:
        """Ctrl-C, and the summary of a run that has kept its promises.

        Raises:
            BenchmarkFailed: it has not, so its figures mean nothing.
        """
        self.interrupt()
        summary = self.finish(timeout_s=PATIENCE_S, clean=False)
        report = self.report()
        if summary.get("state") not in ("interrupted", "finished") or not report.clean:
            wrong = [violation.what for violation in report.violations]
            raise BenchmarkFailed(f"the run ended as {summary.get('state')} with {wrong}\n{self.last_words()}")
        return summary


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest rank: the smallest value that at least ``share`` of all do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
