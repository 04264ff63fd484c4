"""The metrics actor: the one writer of a run's metrics.jsonl, eval.jsonl, events.jsonl, samples.jsonl, trace.json, …

    scheduler, job ──StepRow, Event──▶ ┐             ┌─▶ metrics.jsonl, events.jsonl, eval.jsonl (line by line)
    workers, trainer ──────Spans─────▶ ├─▶ recorder ─┼─▶ trace.json
    rewards ──────Samples────────────▶ ┤             ├─▶ samples.jsonl
    every process ──ProcessHealth────▶ ┘             └─▶ sinks: TensorBoard, W&B, Prometheus (each an actor of its own)

Invariants
- Nobody waits for metrics but for Flush: news comes by tell, and no sink can hold up the files (``sinks/feeds.py``).
- Lines are whole: each is written with its newline in one call. A resumed run appends.
- metrics.jsonl has a row of every step, and is never cut: a row that finds no room ends the run, which writes it when
  it goes on. Events and trace are bounded, and what finds no room of them is left out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors.core.actor import Actor, handles
from actors.core.look import Look
from actors.core.strict_json import strict_json
from actors.core.watch import Down
from actors.host.bounded_file import BoundedFile, append
from actors.host.clock import time_of_day_s
from actors.host.room import no_space
from actors.metrics.ask_watch import AskWatch
from actors.metrics.samples import SamplesFile
from actors.metrics.sinks.feeds import Sinks
from actors.metrics.sinks.sink import SinkSetup
from actors.metrics.trace import TraceFile
from actors.protocol.evaluations import EvaluationRow
from actors.protocol.metrics import Event, Flush, Flushed, ProcessHealth, Samples, Spans, StepRow
from configs.run_files import EVALUATIONS, EVENTS, METRICS, SAMPLES, TRACE
from configs.schema import MetricsConfig


class Metrics(Actor):
    """Writes what it is told of a job into the files of ``run_dir``."""

    def __init__(self, job: str, run_dir: Path, config: MetricsConfig) -> None:
        self._job = job
        self._run_dir = run_dir
        self._config = config
        self._sinks = Sinks(job)

    async def on_start(self) -> None:
        self._run_dir.mkdir(parents=True, exist_ok=True)
        limits = self.ctx.limits
        setup = await self.ctx.run_blocking(SinkSetup.of, self._job, self._run_dir, self._config, limits)
        for name in (METRICS, EVENTS, EVALUATIONS):
            end_last_line(self._run_dir / name)
        self._rows = RowFile(self._run_dir / METRICS)
        self._evaluations = RowFile(self._run_dir / EVALUATIONS)
        self._events = BoundedFile(self._run_dir / EVENTS, limits.events_max_bytes)
        self._samples: SamplesFile | None = SamplesFile(self._run_dir / SAMPLES, limits.samples_file_bytes)
        self._trace = TraceFile(self._run_dir / TRACE, self._job, limits.trace_max_bytes)
        self._asks = AskWatch(self.ctx)
        await self._sinks.start(self.ctx, setup)
        self.ctx.start_task(self._watch_asks(), "watch asks")

    async def _watch_asks(self) -> None:
        """Watch the asks and the health of this process; in the others, their process reporters do."""
        health_at_s = self.ctx.now()
        while True:
            await self.ctx.sleep(self.ctx.limits.beacon_interval_s)
            self._sinks.remind()
            for overdue in self._asks.overdue():
                self._write_event("ask_overdue", overdue)
            if self.ctx.now() - health_at_s >= self.ctx.limits.health_interval_s:
                health_at_s = self.ctx.now()
                sight = self.ctx.look(Look(longer_than_s=self.ctx.limits.stall_report_s))
                if sight.loop_lag is not None:  # else time is virtual
                    await self.process_health(ProcessHealth.of(self._job, sight))

    async def on_stop(self) -> None:
        self._write_event("asks_counted", self._asks.counted())
        self._rows.close()
        self._evaluations.close()
        self._events.close()
        self._trace.close()
        await self._sinks.flush()

    @handles(StepRow)
    async def step_row(self, message: StepRow) -> None:
        self._rows.write(_line(message.row))
        self._sinks.tell(message)

    @handles(EvaluationRow)
    async def evaluation_row(self, message: EvaluationRow) -> None:
        self._evaluations.write(_line(message.row))
        self._sinks.tell(message)

    @handles(Down)
    async def sink_lost(self, message: Down) -> None:
        self._sinks.lost(message)

    @handles(Samples)
    async def samples(self, message: Samples) -> None:
        await self.ctx.run_blocking(self._keep, message)
        self._sinks.tell(message)

    def _keep(self, message: Samples) -> None:
        """Write samples, on the actor's thread."""
        try:
            if self._samples is not None:
                self._samples.add(message.rows)
        except OSError as error:  # a full disk, which others report
            self.ctx.log.error("samples cannot be written and are left out", error=repr(error))
            self._samples = None

    @handles(Event)
    async def event(self, message: Event) -> None:
        self._write_event(message.name, message.fields)

    def _write_event(self, name: str, fields: Mapping[str, float | int | str]) -> None:
        line = {"time_s": round(time_of_day_s(), 6), "job": self._job, "event": name, **fields}
        self._events.write(_line(line))

    @handles(ProcessHealth)
    async def process_health(self, message: ProcessHealth) -> None:
        """Record the health of a process; that of the head comes from ``_watch_asks``."""
        gauges = {name: round(value, 6) for name, value in message.gauges.items()}
        self._write_event("process_health", {"process": message.process, **gauges})
        self._sinks.tell(message)

    @handles(Spans)
    async def spans(self, message: Spans) -> None:
        self._trace.add(message.track, message.spans)

    @handles(Flush)
    async def flush(self, _: Flush) -> Flushed:
        """Answer when all that the asker told before is in the files: messages keep their order, none is buffered.

        The sinks have it then, too, if they are not slow.
        """
        await self._sinks.flush()
        return Flushed()


def _line(row: dict[str, Any]) -> str:
    """One line of strict JSON: what is no finite number becomes null."""
    return strict_json(row, separators=(", ", ": ")) + "\n"


def end_last_line(path: Path) -> None:
    """Put a newline behind a last line that was cut off, so that it does not spoil the next one."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


class RowFile:
    """Appends rows to ``path``: a whole row or none, and an error if there is no room for it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, line: str) -> None:
        """Raises NoSpaceLeft if the disk is full; nothing of the line is written then."""
        try:
            append(self._descriptor, line.encode())
        except OSError as error:
            raise no_space(error, self._path, "the row of a step") or error from error

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
