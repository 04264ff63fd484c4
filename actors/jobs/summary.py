"""The summary of a run: made from the rows of metrics.jsonl, printed by ``run --json``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from actors.host.plain_file import json_object, newest_lines
from configs.limits import DEFAULT_LIMITS

Row = dict[str, float | int | str | None]

FILTER = ("no_signal", "surplus")
"""Columns of a job that filters its groups; the summary has their sums."""
BILL = ("billed_worker_s", "compute_worker_s", "functions_started", "functions_cold_s")
"""Columns of a job with functions; the summary has their sums."""
_ENDS = 5
_COUNTS = frozenset(
    [
        "step",
        "policy_version",
        "samples",
        "samples_dropped",
        "tokens_generated",
        "tokens_trained",
        "response_tokens_max",
        "staleness_max",
        "rows_ignored",
        "samples_migrated",
        "restarts",
        "prompts_lost",
        "samples_trained_twice",
        "seeding_target",
        "grants_ignored",
        "functions_started",
        "no_signal",
        "surplus",
        "episodes",
        "environment_tokens",
        "environment_restarts",
        "tokens_discarded",
    ]
)


def row_of(metrics: dict[str, float]) -> Row:
    """A line of metrics.jsonl, in which counts are whole numbers and a mean of nothing is None."""
    return {
        name: None if not math.isfinite(value) else int(value) if name in _COUNTS else value
        for name, value in metrics.items()
    }


def cost_of(row: Row, spent: float) -> Row:
    """The cost columns of a step that cost ``spent``; a step without tokens has no cost per token."""
    tokens = number(row, "tokens_generated")
    columns: Row = {"cost": spent}
    if tokens:
        columns["cost_per_million_tokens"] = 1e6 * spent / tokens
    return columns


def number(row: Row, name: str) -> float:
    """The value of a row's column ``name``; 0 where it is missing, None or no number."""
    value = row.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def read_rows(path: Path) -> list[Row]:
    """The rows of an earlier part of this run, one a step.

    Raises:
        ConfigError: ``path`` is no plain file.
    """
    return read_lines(path, "step")


def read_lines(path: Path, number: str) -> list[dict[str, Any]]:
    """Rows of a file of JSON lines, one for each value of column ``number``: the last wins; torn lines are skipped.

    Raises:
        ConfigError: ``path`` is no plain file.
    """
    rows: dict[int, dict[str, Any]] = {}
    for line in newest_lines(path, DEFAULT_LIMITS.run_record_bytes):
        row = json_object(line)
        if row is not None and isinstance(value := row.get(number), int):
            rows[value] = row
    return [rows[value] for value in sorted(rows)]


class Summary:
    """Adds up rows: keeps the first and the last five rewards, sums of other columns, and the newest row."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last: list[float] = []
        self.steps = 0
        self.samples = 0
        self.samples_dropped = 0
        self.tokens = 0
        self.spent = 0.0
        self.seconds = 0.0
        """Time of all steps, from commit to commit: the same in every life, and for whoever reads the files."""
        self.bill: dict[str, float] = {}
        self.newest: Row = {}

    def cost(self) -> dict[str, float | None]:
        """Cost of all steps, and of a million generated tokens and a step on average."""
        return {
            "cost": self.spent,
            "cost_per_million_tokens": 1e6 * self.spent / self.tokens if self.tokens else None,
            "cost_per_step": self.spent / self.steps if self.steps else None,
        }

    def add(self, row: Row) -> None:
        if row.get("reward_mean") is not None:  # else no sample of the step was trained
            reward = number(row, "reward_mean")
            if len(self._first) < _ENDS:
                self._first.append(reward)
            self._last = [*self._last, reward][-_ENDS:]
        self.steps = max(self.steps, int(number(row, "step")) + 1)
        self.samples += int(number(row, "samples"))
        self.samples_dropped += int(number(row, "samples_dropped"))
        self.tokens += int(number(row, "tokens_generated"))
        self.spent += number(row, "cost")
        self.seconds += number(row, "seconds")
        for name in (*BILL, *FILTER):
            if name in row:
                self.bill[name] = self.bill.get(name, 0.0) + number(row, name)
        self.newest = row

    def result(self) -> dict[str, float | int | str | None]:
        """The part of the object printed by ``run --json`` that follows from the rows."""
        newest = self.newest
        return {
            "steps": self.steps,
            "reward_first": self.reward_first,
            "reward_last": self.reward_last,
            "samples": self.samples,
            "samples_dropped": self.samples_dropped,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "restarts": newest.get("restarts", 0),
            "prompts_lost": newest.get("prompts_lost", 0),
            "samples_trained_twice": newest.get("samples_trained_twice", 0),
            "tokens_discarded": newest.get("tokens_discarded", 0),
            "policy_version": newest.get("policy_version", 0),
            **{name: int(value) if name in _COUNTS else round(value, 3) for name, value in self.bill.items()},
        }

    @property
    def reward_first(self) -> float | None:
        """Mean reward of the first five steps with samples; None before the first."""
        return sum(self._first) / len(self._first) if self._first else None

    @property
    def reward_last(self) -> float | None:
        """Mean reward of the last five steps with samples; None before the first."""
        return sum(self._last) / len(self._last) if self._last else None
