"""The metrics, events and summaries of simulated jobs, kept in memory for the checkers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.core.actor import handles
from actors.core.strict_json import strict_json
from actors.host.clock import time_of_day_s
from actors.metrics.ask_watch import AskWatch
from actors.metrics.recorder import Metrics
from actors.protocol.metrics import Spans, StepRow
from configs.run_files import METRICS
from configs.schema import MetricsConfig


@dataclass
class JobRecord:
    """A record holds what one job has reported over all lives of its actors."""

    job: str
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Lines of events.jsonl."""
    verdicts: set[tuple[int, str, float | None]] = field(default_factory=set[tuple[int, str, float | None]])
    """Verdicts of the verifiers, each with its prompt, the hash of the response's tokens, and the reward."""
    summary: dict[str, Any] = field(default_factory=dict[str, Any])
    """Summary of the job's last end; empty while no life of the head has brought the job to an end."""


class RecordedMetrics(Metrics):
    """A simulated job's metrics actor keeps events in memory; it writes only the rows, which a next life reads."""

    def __init__(self, record: JobRecord, run_dir: Path, config: MetricsConfig) -> None:
        super().__init__(record.job, run_dir, config)
        self._record = record
        self._file = run_dir / METRICS

    async def on_start(self) -> None:
        self._asks = AskWatch(self.ctx)
        self.ctx.start_task(self._watch_asks(), "watch asks")

    async def on_stop(self) -> None:
        self._write_event("asks_counted", self._asks.counted())

    @handles(StepRow)
    async def step_row(self, message: StepRow) -> None:
        self._record.rows.append(message.row)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(strict_json(message.row) + "\n")

    @handles(Spans)
    async def spans(self, message: Spans) -> None:
        """Ignored: nobody draws a simulated run."""

    def _write_event(self, name: str, fields: Mapping[str, float | int | str]) -> None:
        line = {"time_s": round(time_of_day_s(), 6), "job": self._job, "event": name, **fields}
        self._record.events.append(line)
