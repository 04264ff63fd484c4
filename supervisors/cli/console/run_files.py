"""Reads a run from its directory, and stays up to date by reading what its files have gained.

job.yaml ─▶ settings     metrics.jsonl ─▶ values     trace.json ─▶ spans     events.jsonl ─▶ told, workers, state
samples.jsonl ─▶ samples     eval.jsonl ─▶ evaluations

Invariants
- Nothing is changed in the directory, and a file that is not there yet is read once it is.
- What is kept is bounded by ``limits.console_*``; the newest stays.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import yaml

from actors.host.plain_file import read_plain, require_plain
from actors.jobs.evaluation_rows import is_row as is_evaluation_row
from actors.metrics.samples import sample_of
from actors.protocol.jobs import JobState
from configs.errors import ConfigError
from configs.limits import Limits
from configs.run_files import EVALUATIONS, EVENTS, JOB_FILE, METRICS, SAMPLES, TRACE
from configs.yaml_source import FILE_BYTES_MAX, parse_value
from supervisors.cli.console.page_data import (
    COLUMNS,
    Activity,
    Plain,
    Workers,
    more_columns,
    plain_args,
    sample_card,
    step_values,
    told,
)
from supervisors.cli.console.tails import JsonLines, TraceEvents

OVER: Final = frozenset(str(state) for state in JobState if state.over)
"""States of a job that has ended."""
_SETTINGS: Final = (
    "name", "steps", "model.source", "model.path", "data.source", "data.task", "data.path", "algorithm.name",
    "algorithm.group_size", "algorithm.prompts_per_step", "sync.mode", "sync.max_staleness", "rollout.engine",
    "rollout.workers", "rollout.max_tokens", "trainer.lr",
)  # fmt: skip
"""Keys of the job file that the page names."""


class RunFiles:
    """Reads a run directory. ``look`` returns which of ``rows, events, spans, samples, evaluations`` have changed."""

    def __init__(self, run_dir: Path, limits: Limits) -> None:
        self.run_dir = run_dir
        self.settings = _settings(run_dir)
        self.columns = list(COLUMNS)
        self.values: list[list[float | None]] = []
        """Rows of ``columns``, one a step, ascending."""
        self.evaluations: dict[int, Plain] = {}
        """Version → its row of eval.jsonl."""
        self.new_values = 0
        """Number of rows that the last look added to ``values``; all of them if ``anew``."""
        self.anew = True
        """Whether the last look replaced known rows, and did not only add some."""
        self.spans: deque[Activity] = deque(maxlen=limits.console_spans)
        self.told: deque[Plain] = deque(maxlen=limits.console_events)
        self.workers = Workers(limits.console_spans)
        self.health: dict[str, Plain] = {}
        """Process → its last report on its event loop and its longest wait."""
        self.state = ""
        self.reason = ""
        self.samples: dict[int, list[Plain]] = {}
        self._limits = limits
        self._tracks: dict[int, str] = {}
        self._rows = JsonLines(run_dir / METRICS, limits.console_tail_bytes)
        self._events = JsonLines(run_dir / EVENTS, limits.console_tail_bytes)
        self._samples = JsonLines(run_dir / SAMPLES, limits.console_tail_bytes)
        self._evaluated = JsonLines(run_dir / EVALUATIONS, limits.console_tail_bytes)
        self._trace = TraceEvents(run_dir / TRACE, limits.console_tail_bytes)

    def look(self) -> set[str]:
        """Read what is new."""
        changed = {
            "rows": self._look_at_rows(),
            "events": self._look_at_events(),
            "spans": self._look_at_trace(),
            "samples": self._look_at_samples(),
            "evaluations": self._look_at_evaluations(),
        }
        return {name for name, so in changed.items() if so}

    def _look_at_rows(self) -> bool:
        anew, rows = self._rows.look()
        last = (self.values[-1][0] or 0.0) if self.values and not anew else -1.0
        more = more_columns(rows, self.columns)
        self.columns += more
        self.values = [[*values, *[None] * len(more)] for values in self.values] if more else self.values
        fresh = [values for row in rows if (values := step_values(row, self.columns))[0] is not None]
        steps = [values[0] or 0.0 for values in fresh]
        self.anew = anew or bool(more) or any(b <= a for a, b in itertools.pairwise([last, *steps]))
        known = {values[0]: values for values in [*([] if anew else self.values), *fresh]}
        if fresh or anew:
            self.values = [known[step] for step in sorted(step for step in known if step is not None)]
            self.values = self.values[-self._limits.console_steps :]
        self.new_values = min(len(self.values), len(self.values) if self.anew else len(fresh))
        return bool(fresh) or anew

    def _look_at_events(self) -> bool:
        anew, events = self._events.look()
        if anew:
            self.told.clear()
            self.workers = Workers(self._limits.console_spans)
        for event in events:
            with suppress(TypeError, ValueError, AttributeError):  # none that a run has written
                self._hear(event)
        return bool(events) or anew

    def _hear(self, event: Mapping[str, Any]) -> None:
        over = self.state in OVER
        self.workers.hear(event, over=over)
        if event.get("event") == "process_health":
            process = str(event.get("process"))
            self.health[process] = {
                "process": process, "time_s": event.get("time_s"), "oldest_wait_s": event.get("oldest_wait_s", 0.0),
                "loop_lag_max_s": event.get("loop_lag_max_s", 0.0),
            }  # fmt: skip
        if event.get("event") == "job_state":
            self.state, self.reason = str(event.get("state", "")), str(event.get("reason", ""))
        entry = told(event, over=over)
        if entry is None:
            return
        last = self.told[-1] if self.told else None
        if last and last["kind"] == entry.kind:
            last |= {"text": entry.text, "time_s": event.get("time_s"), "count": last["count"] + 1}
        else:
            self.told.append(
                {
                    "time_s": event.get("time_s"),
                    "level": entry.level,
                    "text": entry.text,
                    "kind": entry.kind,
                    "count": 1,
                }
            )

    def _look_at_trace(self) -> bool:
        anew, events = self._trace.look()
        if anew:
            self.spans.clear()
            self._tracks.clear()
        for event in events:
            try:
                if event["name"] == "thread_name":
                    self._tracks[event["tid"]] = str(event["args"]["name"])
                elif event["ph"] == "X":
                    start_s = event["ts"] / 1e6
                    lane = self._tracks.get(event["tid"], f"track {event['tid']}")
                    end_s, args = start_s + event["dur"] / 1e6, plain_args(event.get("args"))
                    self.spans.append(Activity(lane, str(event["name"]), start_s, end_s, args))
            except (KeyError, TypeError, OverflowError):
                continue
        return bool(events) or anew

    def _look_at_evaluations(self) -> bool:
        anew, rows = self._evaluated.look()
        if anew:
            self.evaluations.clear()
        self.evaluations |= {int(row["version"]): row for row in rows if is_evaluation_row(row)}
        while len(self.evaluations) > self._limits.console_steps:
            del self.evaluations[min(self.evaluations)]
        return bool(rows) or anew

    def _look_at_samples(self) -> bool:
        anew, rows = self._samples.look()
        if anew:
            self.samples.clear()
        for row in rows:
            if (sample := sample_of(row)) is not None:
                cards = self.samples.setdefault(sample["step"], [])
                cards.append(sample_card(sample, self._limits.console_text_chars))
        while len(self.samples) > self._limits.console_sample_steps:
            del self.samples[min(self.samples)]
        return bool(rows) or anew


def _settings(run_dir: Path) -> Plain:
    """The keys of ``job.yaml`` that the page names, with their values.

    Raises:
        ConfigError: ``run_dir`` is no run directory.
    """
    where = f"headrace console {run_dir}"
    file = run_dir / JOB_FILE
    if not file.is_file():
        what = "is no run directory: it has no job.yaml" if run_dir.is_dir() else "is no directory, and no endpoint"
        fix = "Name the directory that the run printed, or an endpoint such as tcp://127.0.0.1:7000"
        raise ConfigError.of(where, "", what, fix)
    require_plain(file)
    try:
        job: object = parse_value(read_plain(file, FILE_BYTES_MAX).decode())
    except (ValueError, yaml.YAMLError) as error:
        what = f"has a job.yaml that cannot be read: {error}"
        raise ConfigError.of(where, "", what, "Take it from a copy, or resume the run from one") from error
    found: Plain = {}
    for key in _SETTINGS:
        value: Any = job
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
            found[key] = value
    return found
