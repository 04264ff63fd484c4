"""The metrics actor: the one writer of a run's metrics.jsonl, eval.jsonl, events.jsonl, samples.jsonl, trace.json, …

    scheduler, job ──StepRow, Event──▶ ┐             ┌─▶ metrics.jsonl, events.jsonl, eval.jsonl (line by line)
    workers, trainer ──────Spans─────▶ ├─▶ recorder ─┼─▶ trace.json
    rewards ──────Samples────────────▶ ┤             ├─▶ samples.jsonl
    every process ──ProcessHealth────▶ ┘             └─▶ sinks: TensorBoard, W&B, Prometheus (on the actor's thread)

Invariants
- Nobody waits for metrics: everything comes by tell, and a sink that fails is reported once and left out.
- Lines are whole: each is written with its newline in one call. A resumed run appends.
- metrics.jsonl has a row of every step, and is never cut: a row that finds no room ends the run, which writes it when
  it goes on. Events and trace are bounded, and what finds no room of them is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from actors.core.actor import Actor, handles
from actors.core.look import Look
from actors.host.bounded_file import BoundedFile
from actors.host.clock import time_of_day_s
from actors.metrics.ask_watch import AskWatch
from actors.metrics.row_file import RowFile, end_last_line
from actors.metrics.samples import SamplesFile
from actors.metrics.sinks import Sink, make_sinks
from actors.metrics.trace import TraceFile
from actors.protocol.evaluations import EvaluationRow
from actors.protocol.metrics import Event, Flush, Flushed, ProcessHealth, Samples, Spans, StepRow
from configs.schema import MetricsConfig


class Metrics(Actor):
    """It writes into ``run_dir``."""

    def __init__(self, job: str, run_dir: Path, config: MetricsConfig) -> None:
        self._job = job
        self._run_dir = run_dir
        self._config = config
        self._sinks: list[Sink] = []

    async def on_start(self) -> None:
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._sinks = await self.ctx.run_blocking(make_sinks, self._config, self._job, self._run_dir)
        limits = self.ctx.limits
        for name in ("metrics.jsonl", "events.jsonl", "eval.jsonl"):
            end_last_line(self._run_dir / name)
        self._rows = RowFile(self._run_dir / "metrics.jsonl")
        self._evaluations = RowFile(self._run_dir / "eval.jsonl")
        self._events = BoundedFile(self._run_dir / "events.jsonl", limits.events_max_bytes)
        self._samples: SamplesFile | None = SamplesFile(self._run_dir / "samples.jsonl", limits.samples_file_bytes)
        self._trace = TraceFile(self._run_dir / "trace.json", self._job, limits.trace_max_bytes)
        self._asks = AskWatch(self.ctx)
        self.ctx.start_task(self._watch_asks(), "watch asks")

    async def _watch_asks(self) -> None:
        """Watch this process; in the others their process reporters watch."""
        health_at_s = self.ctx.now()
        while True:
            await self.ctx.sleep(self.ctx.limits.beacon_interval_s)
            for overdue in self._asks.overdue():
                self._write_event("ask_overdue", overdue)
            if self.ctx.now() - health_at_s >= self.ctx.limits.health_interval_s:
                health_at_s = self.ctx.now()
                sight = self.ctx.look(Look(longer_than_s=self.ctx.limits.stall_report_s))
                if sight.loop_lag is not None:  # else time is virtual
                    await self.process_health(ProcessHealth.of(self._job, sight))

    async def on_stop(self) -> None:
        self._write_event("asks_counted", self._asks.counted())
        for sink in self._sinks:
            await self.ctx.run_blocking(sink.close)
        self._rows.close()
        self._evaluations.close()
        self._events.close()
        self._trace.close()

    @handles(StepRow)
    async def step_row(self, message: StepRow) -> None:
        self._rows.write(_line(message.row))
        if self._sinks:
            await self.ctx.run_blocking(self._feed, message.row)

    @handles(EvaluationRow)
    async def evaluation_row(self, message: EvaluationRow) -> None:
        self._evaluations.write(_line(message.row))
        if self._sinks:
            await self.ctx.run_blocking(self._each_sink, lambda sink: sink.evaluation(message.row))

    def _feed(self, row: Mapping[str, float | int | str | None]) -> None:
        """Give the row to every sink, on the actor's thread."""
        self._each_sink(lambda sink: sink.write(int(row["step"] or 0), row))

    def _each_sink(self, work: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                work(sink)
            except Exception as error:  # noqa: BLE001 - a third party's code and network: no run ends for that
                self.ctx.log.error("a metrics sink failed and is left out", sink=type(sink).__name__, error=repr(error))
                self._sinks.remove(sink)

    @handles(Samples)
    async def samples(self, message: Samples) -> None:
        await self.ctx.run_blocking(self._keep, message)

    def _keep(self, message: Samples) -> None:
        """Write samples, on the actor's thread."""
        try:
            if self._samples is not None:
                self._samples.add(message.rows)
        except OSError as error:  # a full disk: others say so
            self.ctx.log.error("samples cannot be written and are left out", error=repr(error))
            self._samples = None
        self._each_sink(lambda sink: sink.samples(message.step, message.rows))

    @handles(Event)
    async def event(self, message: Event) -> None:
        self._write_event(message.name, message.fields)

    def _write_event(self, name: str, fields: Mapping[str, float | int | str]) -> None:
        line = {"time_s": round(time_of_day_s(), 6), "job": self._job, "event": name, **fields}
        self._events.write(_line(line))

    @handles(ProcessHealth)
    async def process_health(self, message: ProcessHealth) -> None:
        """Record the health of a process; the head's own comes from here."""
        gauges = {name: round(value, 6) for name, value in message.gauges.items()}
        self._write_event("process_health", {"process": message.process, **gauges})
        for sink in self._sinks:
            sink.observe(message.process, gauges)

    @handles(Spans)
    async def spans(self, message: Spans) -> None:
        self._trace.add(message.track, message.spans)

    @handles(Flush)
    async def flush(self, _: Flush) -> Flushed:
        """The mailbox is in order and files are line-buffered, so whoever gets the answer is behind all it has told."""
        return Flushed()


def _line(row: dict[str, Any]) -> str:
    """One line of strict JSON: what is no finite number becomes null."""
    plain = {k: None if isinstance(v, float) and not -1e308 < v < 1e308 else v for k, v in row.items()}
    return json.dumps(plain, separators=(", ", ": "), allow_nan=False) + "\n"
