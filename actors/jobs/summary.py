"""What a run comes to: rows of metrics.jsonl in, the object that ``run --json`` prints out."""

from __future__ import annotations

import json
from pathlib import Path

Row = dict[str, float | int | str]

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
    ]
)


def row_of(metrics: dict[str, float]) -> Row:
    """A line of metrics.jsonl: what counts something is a whole number there."""
    return {name: int(value) if name in _COUNTS else value for name, value in metrics.items()}


def cost_of(row: Row, spent: float) -> Row:
    """The columns of a step in which ``spent`` was spent; a step without tokens has no price for them."""
    tokens = int(row.get("tokens_generated", 0))
    columns: Row = {"cost": spent}
    if tokens:
        columns["cost_per_million_tokens"] = 1e6 * spent / tokens
    return columns


def read_rows(path: Path) -> list[Row]:
    """The rows of an earlier part of this run, one a step, the last one wins; a torn last line is passed over."""
    rows: dict[int, Row] = {}
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        try:
            row: Row = json.loads(line)
            rows[int(row["step"])] = row
        except (ValueError, KeyError, TypeError):
            continue
    return [rows[step] for step in sorted(rows)]


class Summary:
    """It adds rows up. The first and last five rewards are kept, and sums of the rest."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last: list[float] = []
        self.steps = 0
        self.samples = 0
        self.tokens = 0
        self.spent = 0.0
        self.newest: Row = {}

    def cost(self) -> dict[str, float | None]:
        """Cost of all steps, and of a million generated tokens and a step on average."""
        return {
            "cost": self.spent,
            "cost_per_million_tokens": 1e6 * self.spent / self.tokens if self.tokens else None,
            "cost_per_step": self.spent / self.steps if self.steps else None,
        }

    def add(self, row: Row) -> None:
        reward = float(row.get("reward_mean", 0.0))
        if len(self._first) < _ENDS:
            self._first.append(reward)
        self._last = [*self._last, reward][-_ENDS:]
        self.steps = max(self.steps, int(row["step"]) + 1)
        self.samples += int(row.get("samples", 0))
        self.tokens += int(row.get("tokens_generated", 0))
        self.spent += float(row.get("cost", 0.0))
        self.newest = row

    @property
    def reward_first(self) -> float | None:
        """Mean reward of the first five steps; None before the first."""
        return sum(self._first) / len(self._first) if self._first else None

    @property
    def reward_last(self) -> float | None:
        """Mean reward of the last five steps; None before the first."""
        return sum(self._last) / len(self._last) if self._last else None
