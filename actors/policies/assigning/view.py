"""What policies may know, as plain data without a clock: ``now`` is handed in beside it.

Workers and groups are named tuples: a round makes thousands, and a frozen dataclass takes four times as long to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from actors.policies.assigning.latency_table import EMPTY, LatencyTable


class WorkerView(NamedTuple):
    """Describes a live worker that may get work; one that rests or leaves is not shown."""

    name: str
    policy_version: int
    """Version that the worker serves; -1 before its first."""
    slots: int
    """Samples that the worker may hold at once."""
    in_flight: int
    """Samples that the worker holds now."""
    pulling_version: int = -1
    """Newer version that it is loading, -1 if none."""
    pulling_since_s: float = 0.0
    has_suspect: bool = False
    """Whether the worker holds samples of a prompt that may be what crashes engines."""
    latency: LatencyTable = EMPTY
    """Measured decode times of this worker."""
    runs: int | None = None
    """Samples that its engine has been seen to run at once, the rest being pending; None: pending ones do not count."""

    def pending(self, held: int) -> int:
        """How many of ``held`` samples its engine could not begin yet."""
        return 0 if self.runs is None else max(0, held - self.runs)


class GroupView(NamedTuple):
    """Describes the queued samples of one prompt."""

    step: int
    prompt: int
    rows: np.ndarray  # int32[n], rows of the step's batch
    moved: bool = False
    """Whether some of the samples have been with a worker before; others wait for them."""
    suspect: bool = False
    """Whether an engine crashed while it held some of them."""
    version: int = -1
    """Newest version of any of their tokens; they go on with it or with a newer one. -1: they hold none."""
    expected_tokens: float = float("nan")
    """Predicted tokens of one response; NaN: nobody knows, which counts as the median of the known."""
    last_worker: str = ""
    """Worker that has computed the context so far, and may have it in its cache; empty: none in particular."""
    kept_for: frozenset[str] = frozenset()
    """Workers that are dedicated to groups such as this one; empty: any."""
    not_for: frozenset[str] = frozenset()
    """Workers that are dedicated to other groups."""

    def part(self, rows: np.ndarray, expected_tokens: float | None = None) -> GroupView:
        """The same group with only these of its rows."""
        tokens = self.expected_tokens if expected_tokens is None else expected_tokens
        return self._replace(rows=rows, expected_tokens=tokens)


@dataclass(frozen=True, slots=True)
class AssignView:
    workers: list[WorkerView]
    groups: list[GroupView]
    """Groups in order of (step, prompt)."""
    max_staleness: int
    pull_patience_s: float
    """Seconds for which work is given to a worker that is still loading the version that it needs."""
    message_samples: int
    """Samples in one Assign message."""
    keeps_parts: bool = False
    """Whether groups that are kept for certain workers wait for those as long as one of them is there: they are parts
    of a planned step (``step_plan``)."""
