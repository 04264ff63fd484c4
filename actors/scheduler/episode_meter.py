"""The columns of metrics.jsonl and eval.jsonl that only jobs with episodes have.

Turns, contexts, marks and lives come from the ledger. Times, and the metrics that environments report, are kept here
until the step is committed: they are for people only, so a restart of the head may lose those of the present step.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from actors.ledger.batch import SampleState, StepBatch
from actors.ledger.ledger import Ledger
from actors.protocol.endings import OF_EPISODES, column
from actors.protocol.episodes import FRESH, EpisodeEnded
from configs.limits import Limits

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(slots=True)
class _OfStep:
    """Adds up the times and metrics of a step's episodes."""

    seconds: list[float] = field(default_factory=list[float])
    sums: dict[str, tuple[float, int]] = field(default_factory=dict[str, tuple[float, int]])

    def means(self) -> dict[str, float]:
        return {f"env_{name}": total / count for name, (total, count) in sorted(self.sums.items())}


class EpisodeMeter:
    """Makes the columns of a step's row that describe its episodes."""

    def __init__(self, ledger: Ledger, limits: Limits) -> None:
        self._ledger, self._limits = ledger, limits
        self._steps: dict[int, _OfStep] = defaultdict(_OfStep)

    def ended(self, news: EpisodeEnded, seconds: float | None) -> None:
        """Count an episode that has its reward. ``seconds``: duration of its last life; None: unknown."""
        step = self._steps[news.episode.step]
        if seconds is not None:
            step.seconds.append(seconds)
        for name, value in news.metrics.items():
            if not _NAME.fullmatch(name) or not math.isfinite(value):
                continue
            if name in step.sums or len(step.sums) < self._limits.environment_metrics_max:
                total, count = step.sums.get(name, (0.0, 0))
                step.sums[name] = total + value, count + 1

    def take(self, batch: StepBatch) -> dict[str, float]:
        """The columns of a step that is committed."""
        rows = np.flatnonzero(batch.state == SampleState.COMMITTED).astype(np.int32)
        marks, said = batch.ragged(rows).versions, self._steps.pop(batch.step, _OfStep())
        for step in [step for step in self._steps if 0 <= step < batch.step]:
            del self._steps[step]
        return {
            "episodes": len(rows),
            "turns_mean": float(batch.turns[rows].mean()) if len(rows) else math.nan,
            "contexts_mean": np.count_nonzero(marks == FRESH) / len(rows) if len(rows) else math.nan,
            "environment_tokens": int(np.count_nonzero(marks < 0)),
            "tokens_discarded": self._ledger.counters.tokens_discarded,
            "episode_s_mean": sum(said.seconds) / len(said.seconds) if said.seconds else math.nan,
            "episode_s_max": max(said.seconds, default=math.nan),
            "environment_restarts": int(np.maximum(batch.lives - 1, 0).sum()),
            **{
                column(ending): float((batch.finish[rows] == ending).mean()) if len(rows) else math.nan
                for ending in OF_EPISODES
            },
            **said.means(),
        }

    def take_evaluation(self, batch: StepBatch) -> dict[str, float]:
        """The columns of an evaluation that is over."""
        rows, said = np.flatnonzero(batch.state == SampleState.SCORED), self._steps.pop(batch.step, _OfStep())
        return {"turns_mean": float(batch.turns[rows].mean()) if len(rows) else math.nan, **said.means()}
