"""What a job remembers of its steps: enough for the summary, and read back from metrics.jsonl after a restart."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

Row = dict[str, float | int | str]

ENDS = 5
"""``reward_first`` and ``reward_last`` are means over this many steps."""


@dataclass
class History:
    """Sums over committed steps, each counted once however often it was replayed."""

    rewards: dict[int, float] = field(default_factory=dict[int, float])
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    last: Row = field(default_factory=Row)

    def add(self, row: Row) -> None:
        """Take in one row of metrics.jsonl; a step that is known already is left out."""
        step = int(row["step"])
        if step in self.rewards:
            return
        self.rewards[step] = float(row.get("reward_mean", 0.0))
        self.samples += int(row.get("samples", 0))
        self.tokens += int(row.get("tokens_generated", 0))
        self.seconds += float(row.get("seconds", 0.0))
        self.last = row

    @property
    def reward_first(self) -> float | None:
        return _mean([self.rewards[step] for step in sorted(self.rewards)[:ENDS]])

    @property
    def reward_last(self) -> float | None:
        return _mean([self.rewards[step] for step in sorted(self.rewards)[-ENDS:]])


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def read_history(metrics: Path) -> History:
    """The history in ``metrics`` (metrics.jsonl); a torn last line is left out."""
    history = History()
    if metrics.exists():
        for line in metrics.read_text(encoding="utf-8").splitlines():
            try:
                history.add(json.loads(line))
            except (json.JSONDecodeError, KeyError):
                continue
    return history
