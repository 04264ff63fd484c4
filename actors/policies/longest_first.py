"""Longest first: of the samples that wait, the one that is expected to take longest begins next.

StreamRL (arXiv 2504.15930), skewness-aware scheduling: with more samples than places, an instance fills its places in
descending order of the estimate, and each place that becomes free goes to the longest that is left. That is Graham's
longest-processing-time rule for P||Cmax: at most 4/3 of the best makespan with exact lengths, and the tail begins first
however rough they are.

Ties keep their order, so with no estimates at all (all equal) first come is first served.
"""

from __future__ import annotations

import numpy as np


def longest_first(estimates: np.ndarray) -> np.ndarray:
    """Positions in descending order of ``estimates``, equal ones as they came; NaN, not known, goes last."""
    return np.argsort(-np.asarray(estimates, np.float64), kind="stable")
