"""StreamRL Fig. 7 and Tab. 4: the workload's lengths, and the recall of an emulated ranker."""

from __future__ import annotations

import numpy as np

from benchmarks.papers.cluster.lengths import draw_lengths, estimate_lengths, recall_of_longest
from benchmarks.papers.setups.streamrl import LengthsStudy, RankerStudy


def length_statistics(study: LengthsStudy, seed: int) -> dict[str, float]:
    """Mean, percentiles, and the means of the longest fifth and of the rest."""
    lengths = np.sort(draw_lengths(study.lengths, study.samples, np.random.default_rng(seed)))
    longest = len(lengths) // 5
    percentiles = {f"p{p}_tokens": float(np.percentile(lengths, p)) for p in (50, 75, 80, 90, 95)}
    return percentiles | {
        "mean_tokens": float(lengths.mean()),
        "longest_fifth_mean_tokens": float(lengths[-longest:].mean()),
        "rest_mean_tokens": float(lengths[:-longest].mean()),
    }


def ranker_recall(study: RankerStudy, seed: int) -> dict[str, float]:
    """Recall of the longest 20, 10 and 5 %."""
    rng = np.random.default_rng(seed)
    lengths = draw_lengths(study.lengths, study.samples, rng)
    estimates = estimate_lengths(lengths, study.ranker, rng)
    return {f"recall_{percent}": recall_of_longest(lengths, estimates, percent / 100) for percent in (20, 10, 5)}
