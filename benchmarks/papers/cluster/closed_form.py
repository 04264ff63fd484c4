"""StreamRL's own choice of how many workers get long samples only (arXiv 2504.15930, Algorithm 2), to compare with.

With L_t = P90 and L_r = P50 of recent lengths and Latency = PTL(batch) · L · ⌈M / batch⌉, it is the number with the
least *sum* of the latencies of the two groups; ``objective="max"`` takes the larger of them instead, since the groups
run side by side. It never says zero, and knows nothing of what a worker still has of the step before.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from actors.policies.assigning.dispatch_long import ALPHA
from actors.policies.assigning.generation_time import Instance


def closed_form(
    recent_lengths: np.ndarray,
    instance: Instance,
    workers: int,
    *,
    objective: Literal["sum", "max"] = "sum",
) -> int:
    """Algorithm 2: the number of dedicated workers of equal ones, from 1 to ``workers`` - 1."""
    long = math.ceil(ALPHA * len(recent_lengths))
    long_tokens, rest_tokens = (float(np.percentile(recent_lengths, p)) for p in (90, 50))

    def latency_s(samples: int, tokens: float, share: int) -> float:
        each = math.ceil(samples / share)
        batch = max(1, int(min(each, instance.places, instance.kv_tokens / max(1, instance.reserve_tokens))))
        return instance.pace.step_s(batch, tokens / 2) * tokens * math.ceil(each / batch)

    def score(dedicated: int) -> float:
        parts = (
            latency_s(long, long_tokens, dedicated),
            latency_s(len(recent_lengths) - long, rest_tokens, workers - dedicated),
        )
        return sum(parts) if objective == "sum" else max(parts)

    return min(range(1, workers), key=score)
