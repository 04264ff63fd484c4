"""What policies may know: narrow, plain, and without a clock. ``now`` is handed in beside it.

Workers and groups are named tuples: a round makes thousands, and a frozen dataclass takes four times as long to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from actors.policies.latency_table import EMPTY, LatencyTable


class WorkerView(NamedTuple):
    """It is one live worker that may get work; one that rests or leaves is not shown."""

    name: str
    policy_version: int
    """Version that it serves; -1 before its first."""
    slots: int
    """Samples that it holds at once."""
    in_flight: int
    """Samples that it holds now."""
    pulling_version: int = -1
    """Newer version that it is loading, -1 if none."""
    pulling_since_s: float = 0.0
    has_suspect: bool = False
    """Whether it holds samples of a prompt that may be what kills engines."""
    latency: LatencyTable = EMPTY
    """Measured time of a token there."""
    runs: int | None = None
    """Samples that its engine has been seen to run at once, where that is of interest; the rest is pending."""

    def pending(self, held: int) -> int:
        """How many of ``held`` samples its engine could not begin yet."""
        return 0 if self.runs is None else max(0, held - self.runs)


class GroupView(NamedTuple):
    """These are the queued samples of one prompt."""

    step: int
    prompt: int
    rows: np.ndarray  # int32[n], rows of the step's batch
    moved: bool = False
    """Whether some have been with a worker before, and hold tokens that others wait for."""
    suspect: bool = False
    """Whether an engine crashed while it held some of them."""
    version: int = -1
    """Newest version of any of their tokens; they go on with it or with a newer one. -1: they hold none."""
    expected_tokens: float = float("nan")
    """Predicted tokens of one response; NaN: nobody knows, which counts as the median of the known."""
    last_worker: str = ""
    """Worker that has computed what they go on from, and may have it at hand; empty: nobody in particular."""
    kept_for: frozenset[str] = frozenset()
    """Workers that are dedicated to groups such as this one; empty: any."""
    not_for: frozenset[str] = frozenset()
    """Workers that are dedicated to other groups."""

    def part(self, rows: np.ndarray, expected_tokens: float | None = None) -> GroupView:
        """The same of some of its rows."""
        tokens = self.expected_tokens if expected_tokens is None else expected_tokens
        return self._replace(rows=rows, expected_tokens=tokens)


@dataclass(frozen=True, slots=True)
class AssignView:
    workers: list[WorkerView]
    groups: list[GroupView]
    """Groups in order of (step, prompt)."""
    max_staleness: int
    pull_patience_s: float
    """Time for which work is kept for a worker that is loading the version it needs."""
    message_samples: int
    """Samples in one Assign message."""
    keeps_parts: bool = False
    """Whether groups that are kept for certain workers wait for those as long as one of them is there: they are parts
    of a planned step (``step_plan``)."""
