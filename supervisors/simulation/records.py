"""What simulated jobs say of themselves, kept for the checkers: rows, events, ends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.core.actor import handles
from actors.host.clock import time_of_day_s
from actors.metrics.ask_watch import AskWatch
from actors.metrics.recorder import Metrics
from actors.protocol.metrics import Spans, StepRow
from configs.schema import MetricsConfig


@dataclass
class JobRecord:
    """This is the record of one job, over all lives of its actors."""

    job: str
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Events, as the lines of events.jsonl."""
    verdicts: set[tuple[int, str, float | None]] = field(default_factory=set[tuple[int, str, float | None]])
    """Prompt, hash of the response's tokens, reward: what the verifiers have said."""
    summary: dict[str, Any] = field(default_factory=dict[str, Any])
    """Summary of the last end; empty while no life of the head has brought the job to one."""


class RecordedMetrics(Metrics):
    """This is the metrics actor without its files, but for that of rows, which a job's next life reads."""

    def __init__(self, record: JobRecord, run_dir: Path, config: MetricsConfig) -> None:
        super().__init__(record.job, run_dir, config)
        self._record = record
        self._file = run_dir / "metrics.jsonl"

    async def on_start(self) -> None:
        self._asks = AskWatch(self.ctx)
        self.ctx.start_task(self._watch_asks(), "watch asks")

    async def on_stop(self) -> None:
        self._write_event("asks_counted", self._asks.counted())

    @handles(StepRow)
    async def step_row(self, message: StepRow) -> None:
        self._record.rows.append(message.row)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(message.row) + "\n")

    @handles(Spans)
    async def spans(self, message: Spans) -> None:
        """No picture is made of a simulated run."""

    def _write_event(self, name: str, fields: Mapping[str, float | int | str]) -> None:
        line = {"time_s": round(time_of_day_s(), 6), "job": self._job, "event": name, **fields}
        self._record.events.append(line)
