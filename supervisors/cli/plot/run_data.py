"""Reads from a run directory what can be drawn, also while the run goes on, and changes nothing in it.

trace.json ─▶ lanes: who did what when        metrics.jsonl ─▶ rows, one a step        eval.jsonl ─▶ evaluations
journal.db ─▶ response lengths
services/*/trace.json, of several jobs ─▶ a lane for each job of each training service
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import yaml

from actors.host.plain_file import read_plain
from actors.jobs.evaluation_rows import EvalRow
from actors.jobs.evaluation_rows import read_rows as read_evaluations
from actors.jobs.summary import Row, read_rows
from actors.ledger.journal import committed_samples
from configs.errors import ConfigError
from configs.limits import DEFAULT_LIMITS
from configs.run_files import EVALUATIONS, JOB_FILE, JOURNAL, METRICS, TRACE
from configs.yaml_source import FILE_BYTES_MAX, parse_value

BUBBLES: Final = frozenset(["idle", "wait"])
"""Spans in which a process has nothing to do."""
BESIDE: Final = frozenset(["pull", "prefetch"])
"""Spans that run beside another one and keep nobody from working."""
NO_WORK: Final = BUBBLES | BESIDE | {"load"}
"""Spans that do not count as work: a service that makes a job's backend, and compiles it, trains nothing yet."""

_SILENCE_S: Final = 2.0
"""Longest silence of a process that is there: spans come once a second, and none covers the optimizer step."""


class Bar(NamedTuple):
    """One activity of a lane, in seconds since the first bar of the run."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class RunData:
    name: str
    run_dir: Path | None = None
    """Directory of the run; None: the data are those of shared training services."""
    lanes: dict[str, list[Bar]] = field(default_factory=dict[str, list[Bar]])
    """Lanes of the trainer and then of the workers in their order; bars by start."""
    rows: list[Row] = field(default_factory=list[Row])
    evaluations: list[EvalRow] = field(default_factory=list[EvalRow])
    """Rows of eval.jsonl, the oldest version first."""
    lengths: dict[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])
    """Step → response tokens of its samples, int32[n]."""
    settings: str = ""
    """Text of the job file."""
    began_s: float = 0.0
    """Time of day at which the job file was written; 0: unknown."""

    @property
    def end_s(self) -> float:
        return max((bar.end_s for bars in self.lanes.values() for bar in bars), default=0.0)

    @property
    def job(self) -> dict[str, Any]:
        """The job file, as far as it can be read."""
        try:
            found = parse_value(self.settings)
        except yaml.YAMLError:
            return {}
        return found if isinstance(found, dict) else {}

    def column(self, name: str) -> np.ndarray:
        """float64[rows], NaN where a row has no such number."""
        return np.array([_number(row.get(name)) for row in self.rows])


def presence(bars: list[Bar]) -> list[tuple[float, float]]:
    """When a lane's process was there: it records all that it does, idling included; longer silence means absence."""
    present: list[tuple[float, float]] = []
    for bar in bars:
        if present and bar.start_s - present[-1][1] <= _SILENCE_S:
            present[-1] = present[-1][0], max(present[-1][1], bar.end_s)
        else:
            present.append((bar.start_s, bar.end_s))
    return present


def busy_fraction(bars: list[Bar], start_s: float, end_s: float) -> float:
    """Part of the time in which a lane did something; time that no bar covers counts as doing nothing."""
    if end_s <= start_s:
        return 0.0
    busy = sum(max(0.0, min(bar.end_s, end_s) - max(bar.start_s, start_s)) for bar in bars if bar.name not in NO_WORK)
    return min(1.0, busy / (end_s - start_s))


def read_run(run_dir: Path) -> RunData:
    """What ``run_dir`` holds.

    Raises:
        ConfigError: it is no run directory, or the run has not come far enough to be drawn.
        JournalUnreadable: its journal is damaged.
    """
    job_file = run_dir / JOB_FILE
    if not job_file.is_file():
        raise _wrong(run_dir, "is no run directory: it has no job.yaml", "Name the directory that the run printed")
    rows = read_rows(run_dir / METRICS)
    lanes = _lanes(_spans(run_dir / TRACE))
    if not rows and not lanes:
        raise _wrong(run_dir, "has no step and no trace yet", "Wait until its first step is committed")
    lengths: dict[int, list[int]] = {}
    journal = run_dir / JOURNAL
    for sample in committed_samples(journal) if journal.exists() else []:
        if sample.state == "committed":
            lengths.setdefault(sample.step, []).append(sample.n_tokens)
    return RunData(
        name=run_dir.resolve().name,
        run_dir=run_dir,
        lanes=lanes,
        rows=rows,
        evaluations=read_evaluations(run_dir / EVALUATIONS),
        lengths={step: np.array(lengths[step], np.int32) for step in sorted(lengths)},
        settings=read_plain(job_file, FILE_BYTES_MAX).decode("utf-8", errors="replace"),
        began_s=job_file.stat().st_mtime,
    )


def read_services(directory: Path) -> RunData:
    """What the training services have done that several jobs of one command shared.

    Raises:
        ConfigError: no service has left a trace.
    """
    spans: list[_Span] = []
    for trace in sorted((directory / "services").glob("*/trace.json")):
        of = f"{trace.parent.name}: "
        spans += [span._replace(lane=of + span.lane) for span in _spans(trace)]
    if not spans:
        fix = "Name the run directory of one of its jobs, or wait until a service has computed for them"
        raise _wrong(directory, "is that of several jobs, which have no trace of a training service", fix)
    lanes = {lane: list(_with_pauses(bars)) for lane, bars in _lanes(spans).items()}
    return RunData(name=directory.resolve().name, lanes=lanes)


def _with_pauses(bars: list[Bar]) -> Iterator[Bar]:
    """Fill gaps with ``idle``: a service records nothing of a job that asks for nothing, though the job is there."""
    until_s = bars[0].start_s
    for bar in bars:
        if bar.start_s > until_s:
            yield Bar("idle", until_s, bar.start_s)
        yield bar
        until_s = max(until_s, bar.end_s)


class _Span(NamedTuple):
    """One bar of a trace, in the microseconds of the trace."""

    start: float
    duration: float
    lane: str
    name: str


def _spans(path: Path) -> list[_Span]:
    if not path.exists():
        return []
    content = read_plain(path, DEFAULT_LIMITS.run_record_bytes)
    try:
        events: list[dict[str, Any]] = json.loads(content)
        names: dict[int, str] = {e["tid"]: str(e["args"]["name"]) for e in events if e["name"] == "thread_name"}
        found = [
            _Span(float(e["ts"]), float(e["dur"]), names[e["tid"]], str(e["name"])) for e in events if e["ph"] == "X"
        ]
        return [span for span in found if math.isfinite(span.start + span.duration)]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise _wrong(path, f"is no trace: {error!r}", "Remove it, and draw the rest") from error


def _lanes(spans: list[_Span]) -> dict[str, list[Bar]]:
    """Lanes in their order, with their bars by start."""
    first = min((span.start for span in spans), default=0.0)
    lanes: dict[str, list[Bar]] = {lane: [] for lane in sorted({span.lane for span in spans}, key=lane_order)}
    for start, duration, lane, name in sorted(spans):
        lanes[lane].append(Bar(name, (start - first) / 1e6, (start - first + duration) / 1e6))
    return lanes


def lane_order(lane: str) -> tuple[bool, bool, str, int, str]:
    """The trainer, the rollout workers, then the others by name and number."""
    kind, _, number = lane.rpartition("-")
    return lane != "trainer", kind != "rollout", kind, int(number) if number.isdecimal() else 0, lane


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def _wrong(path: Path, what: str, fix: str) -> ConfigError:
    return ConfigError.of(f"headrace plot {path}", "", what, fix)
