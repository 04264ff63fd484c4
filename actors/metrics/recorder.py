"""The metrics actor: everything that a run leaves behind for people and tools.

    job ──StepRow──▶ metrics.jsonl · TensorBoard · W&B (if configured) · Prometheus (if configured)
    anyone ──Event──▶ events.jsonl
    workers, trainer ──Spans──▶ trace.json

Each line is flushed as it is written: a killed run leaves whole lines.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from actors.core.actor import Actor, handles
from actors.metrics.messages import Event, Spans, StepRow
from actors.metrics.sinks import StepSink, open_sinks
from actors.metrics.trace_file import TraceFile
from configs.schema import JobConfig


class MetricsRecorder(Actor):
    """Writes one job's metrics into its run directory. A resumed run appends."""

    def __init__(self, job: JobConfig, run_dir: Path) -> None:
        self._job = job
        self._run_dir = run_dir
        self._sinks: list[StepSink] = []

    async def on_start(self) -> None:
        self._metrics = (self._run_dir / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)
        self._events = (self._run_dir / "events.jsonl").open("a", encoding="utf-8", buffering=1)
        self._trace = TraceFile(self._run_dir / "trace.json", process_name=f"headrace {self._job.name}")
        self._sinks = open_sinks(self._job, self._run_dir)

    async def on_stop(self) -> None:
        self._metrics.close()
        self._events.close()
        self._trace.close()
        for sink in self._sinks:
            sink.close()

    @handles(StepRow)
    async def step_row(self, message: StepRow) -> None:
        self._metrics.write(_line(message.row))
        for sink in self._sinks:
            sink.write(message.row)

    @handles(Event)
    async def event(self, message: Event) -> None:
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._events.write(_line({"time": stamp, "job": message.job, "event": message.name, **message.fields}))

    @handles(Spans)
    async def spans(self, message: Spans) -> None:
        self._trace.add(message.track, message.spans)


def _line(fields: dict[str, Any]) -> str:
    return json.dumps(fields) + "\n"
